//! Parses any bytes as a tensorizer file. An accepted file must have distinct names, and its
//! descriptions and tensors must cover it without gap or overlap. Encrypted tensors must lie in the
//! file, and decryption with any key must not panic.

#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use tensorfs::internal::format::tensorizer::decryptor::{Decryptor, EncryptedTensor};
use tensorfs::internal::format::tensorizer::keys::Secret;
use tensorfs::internal::format::tensorizer::{HEAD_LEN, parse_file};

fuzz_target!(|data: &[u8]| {
    check(data);
    // A head in front of the bytes, which random bytes would hardly ever hit. The first bytes are
    // the version, the flags, the number of tensors and the length of their list.
    let Some((&[version, flags, count, len_low, len_high], rest)) = data.split_first_chunk() else {
        return;
    };
    let mut file = b"|TZR|".to_vec();
    file.extend(u32::from(version).to_le_bytes());
    file.push(flags);
    file.resize(57, 0);
    file.extend(u64::from(count).to_le_bytes());
    file.extend(u64::from(u16::from_le_bytes([len_low, len_high])).to_le_bytes());
    assert_eq!(file.len() as u64, HEAD_LEN);
    file.extend(rest);
    check(&file);
});

fn check(file: &[u8]) {
    let Ok(description) = parse_file(file) else { return };
    let mut ranges = description.described.clone();
    let mut names = BTreeSet::new();
    for tensor in description.tensors() {
        assert!(names.insert(tensor.name.to_owned()), "{} stands twice", tensor.name);
        let bits = tensor.facts.dtype.bits_of(tensor.shape).expect("it was checked");
        assert_eq!(bits % 8, 0);
        // Tensors without data are zeros behind the file.
        if tensor.start >= 1 << 63 {
            continue;
        }
        ranges.push(tensor.start..tensor.start + bits / 8);
    }
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    assert_eq!(ranges[0].start, 0);
    assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
    assert!(ranges[ranges.len() - 1].end <= file.len() as u64);
    check_encrypted(description.encrypted.unwrap_or_default(), file);
}

fn check_encrypted(encrypted: Vec<EncryptedTensor>, file: &[u8]) {
    for tensor in &encrypted {
        assert!(tensor.range.start < tensor.range.end && tensor.range.end <= file.len() as u64);
    }
    let secret = Secret::parse_key(&[7; 32]).expect("its length is right");
    let Ok(decryptor) = Decryptor::new(encrypted, &secret) else { return };
    let whole = 0..file.len() as u64;
    assert_eq!(decryptor.cover(&whole), whole);
    let _ = decryptor.decrypt(0, &mut file.to_vec());
    if let Some(sample) = decryptor.sample() {
        assert_eq!(decryptor.cover(&sample), sample);
        assert!(
            decryptor
                .decrypt(
                    sample.start,
                    &mut file[sample.start as usize..sample.end as usize].to_vec()
                )
                .is_err()
        );
    }
}
