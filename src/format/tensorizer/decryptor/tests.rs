//! Tests of decryptors on files of tensors with bytes between them.

use proptest::prelude::*;

use super::super::keys::{KeyDerivation, SALT_LEN};
use super::super::secretbox::{KEY_LEN, MAC_LEN, NONCE_LEN, PieceNonce};
use super::*;

const KEY: [u8; KEY_LEN] = [3; KEY_LEN];

/// A tensor to make: number of bytes in front of it, its length, and the length of its pieces.
type Made = (u64, u64, u64);

fn made() -> impl Strategy<Value = Vec<Made>> {
    let tensor = (0..300_u64, 1..6000_u64, 0..40_u64)
        .prop_map(|(before, len, steps)| (before, len, 1024 + 64 * steps));
    proptest::collection::vec(tensor, 1..6)
}

/// The plain file, the stored file, and its decryptor.
fn file(tensors: &[Made]) -> (Vec<u8>, Vec<u8>, Decryptor) {
    let key = DataKey::new(&KEY);
    let (mut plain, mut stored, mut encrypted) = (Vec::new(), Vec::new(), Vec::new());
    for (number, &(before, len, piece_len)) in tensors.iter().enumerate() {
        plain.resize(plain.len() + before as usize, 0xee);
        let start = plain.len() as u64;
        plain.extend((0..len).map(|byte| (byte * 31 + number as u64) as u8));
        stored.resize(start as usize, 0xee);
        let nonce = PieceNonce::new([number as u8; NONCE_LEN]);
        let mut data = plain[start as usize..].to_vec();
        let mut section = piece_len.to_le_bytes().to_vec();
        section.extend(nonce.bytes());
        section.extend(len.div_ceil(piece_len).to_le_bytes());
        for (index, piece) in data.chunks_mut(piece_len as usize).enumerate() {
            section.extend(key.seal(&nonce.of_piece(index as u64), piece));
        }
        stored.extend(data);
        let tagged = [&2_u16.to_le_bytes()[..], &section].concat();
        let part = [&(tagged.len() as u64).to_le_bytes()[..], &tagged].concat();
        let body = [&1_u16.to_le_bytes()[..], &part].concat();
        let section = [&(body.len() as u64).to_le_bytes()[..], &body].concat();
        let encryption = Encryption::parse(&section, len).expect("it is right").expect("encrypted");
        let range = start..start + len;
        encrypted.push(EncryptedTensor { name: number.to_string(), range, encryption });
    }
    plain.extend([0xee; 100]);
    stored.extend([0xee; 100]);
    let secret = Secret::parse_key(&KEY).expect("its length is right");
    (plain, stored, Decryptor::new(encrypted, &secret).expect("the pieces are short"))
}

proptest! {
    #[test]
    fn what_covers_a_range_decrypts_to_the_plain_bytes(
        tensors in made(),
        a in any::<prop::sample::Index>(),
        b in any::<prop::sample::Index>(),
    ) {
        let (plain, stored, decryptor) = file(&tensors);
        let (a, b) = (a.index(plain.len()) as u64, b.index(plain.len()) as u64);
        let range = a.min(b)..a.max(b) + 1;
        let cover = decryptor.cover(&range);
        prop_assert!(cover.start <= range.start && range.end <= cover.end);
        prop_assert_eq!(decryptor.cover(&cover), cover.clone());
        let within = cover.start as usize..cover.end as usize;
        let mut bytes = stored[within.clone()].to_vec();
        prop_assert!(decryptor.decrypt(cover.start, &mut bytes).is_ok());
        prop_assert!(bytes == plain[within]);
    }

    #[test]
    fn reads_that_end_well_cover_a_range_without_a_cut_piece(
        tensors in made(),
        a in any::<prop::sample::Index>(),
        b in any::<prop::sample::Index>(),
        chunk in 1..5000_u64,
    ) {
        let (plain, _, decryptor) = file(&tensors);
        let (a, b) = (a.index(plain.len()) as u64, b.index(plain.len()) as u64);
        let range = a.min(b)..a.max(b) + 1;
        let mut start = range.start;
        while start < range.end {
            let aim = start..(start + chunk).min(range.end);
            let end = decryptor.good_end(&aim);
            prop_assert!(end > start);
            let cut = decryptor.piece_at(end).filter(|piece| piece.start < end);
            prop_assert!(cut.is_none(), "{cut:?} is cut at {end}");
            let piece = decryptor.piece_at(start);
            prop_assert!(end <= aim.end || piece.is_some_and(|piece| piece.end == end));
            start = end;
        }
    }

    #[test]
    fn a_changed_byte_is_noticed_in_its_piece_and_in_no_other(
        tensors in made(),
        changed in any::<prop::sample::Index>(),
    ) {
        let (_, mut stored, decryptor) = file(&tensors);
        let changed = changed.index(stored.len());
        stored[changed] ^= 0x80;
        let piece = decryptor.piece_at(changed as u64);
        let mut all = stored.clone();
        let failed = decryptor.decrypt(0, &mut all).err();
        prop_assert_eq!(failed.as_ref().map(|fault| fault.kind), piece.as_ref().map(|_| ErrorKind::DecryptFailed));
        let mut offset = 0;
        while offset < stored.len() as u64 {
            let Some(other) = decryptor.piece_at(offset) else {
                offset += 1;
                continue;
            };
            let mut bytes = stored[other.start as usize..other.end as usize].to_vec();
            let opened = decryptor.decrypt(other.start, &mut bytes).is_ok();
            prop_assert_eq!(opened, piece.as_ref() != Some(&other));
            offset = other.end;
        }
    }
}

#[test]
fn a_part_of_a_piece_is_an_error() {
    let (_, stored, decryptor) = file(&[(10, 3000, 1024)]);
    for part in [10..1033, 11..1034, 10..2000, 1034..2000, 2058..3009] {
        let mut bytes = stored[part.clone()].to_vec();
        let fault = decryptor.decrypt(part.start as u64, &mut bytes).expect_err("no whole piece");
        assert_eq!(fault.kind, ErrorKind::DecryptFailed, "{part:?}");
    }
    assert!(decryptor.decrypt(10, &mut stored[10..1034].to_vec()).is_ok());
    assert!(decryptor.decrypt(3010, &mut [0; 5]).is_ok());
    assert_eq!(decryptor.sample(), Some(10..1034));
}

#[test]
fn a_file_with_two_key_derivations_is_refused_before_a_key_is_derived() {
    let tensor = |number: u64, salt: u8| {
        let derivation =
            KeyDerivation { ops_limit: 1, mem_limit: 64 << 10, salt: [salt; SALT_LEN] };
        let nonce = PieceNonce::new([0; NONCE_LEN]);
        let encryption = Encryption::new(Some(derivation), 8, nonce, vec![[0; MAC_LEN]]);
        let range = number * 8..number * 8 + 8;
        EncryptedTensor { name: number.to_string(), range, encryption }
    };
    let passphrase = Secret::passphrase(b"x".to_vec().into()).expect("it is not empty");
    assert!(Decryptor::new(vec![tensor(0, 1), tensor(1, 1)], &passphrase).is_ok());
    for secret in [passphrase, Secret::parse_key(&KEY).expect("its length is right")] {
        let tensors = vec![tensor(0, 1), tensor(1, 1), tensor(2, 2)];
        let fault = Decryptor::new(tensors, &secret).expect_err("there are two salts");
        assert_eq!(fault.kind, ErrorKind::HeaderDecode);
        assert_eq!(fault.tensor.as_deref(), Some("2"));
    }
}

#[test]
fn a_piece_that_takes_too_much_memory_is_refused() {
    let secret = Secret::parse_key(&KEY).expect("its length is right");
    let tensor = |len: u64| {
        let one = [&3_u16.to_le_bytes()[..], &[0; NONCE_LEN + MAC_LEN]].concat();
        let part = [&(one.len() as u64).to_le_bytes()[..], &one].concat();
        let body = [&1_u16.to_le_bytes()[..], &part].concat();
        let section = [&(body.len() as u64).to_le_bytes()[..], &body].concat();
        let encryption = Encryption::parse(&section, len).expect("it is right").expect("encrypted");
        EncryptedTensor { name: "one".to_owned(), range: 0..len, encryption }
    };
    assert!(Decryptor::new(vec![tensor(PIECE_LEN_MAX)], &secret).is_ok());
    for len in [PIECE_LEN_MAX + 1, 1 << 40, 1 << 62] {
        let fault = Decryptor::new(vec![tensor(len)], &secret).expect_err("it is too long");
        assert_eq!(fault.tensor.as_deref(), Some("one"));
    }
}
