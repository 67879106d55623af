//! Tests of the encryption of tensors: vectors of NaCl and of the tensorizer package, and sections
//! with one fault each.

use std::sync::Arc;

use proptest::prelude::*;
use zeroize::Zeroizing;

use super::super::keys::Secret;
use super::super::secretbox::KEY_LEN;
use super::*;

/// The test vector of `crypto_secretbox` in NaCl: key, nonce, message, MAC and cipher text.
const NACL_KEY: &str = "1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389";
const NACL_NONCE: &str = "69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37";
const NACL_MESSAGE: &str = "be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffce5ecbaaf33bd751a\
                            1ac728d45e6c61296cdc3c01233561f41db66cce314adb310e3be8250c46f06dceea3a7fa134805\
                            7e2f6556ad6b1318a024a838f21af1fde048977eb48f59ffd4924ca1c60902e52f0a089bc76897040\
                            e082f937763848645e0705";
const NACL_MAC: &str = "f3ffc7703f9400e52a7dfb4b3d3305d9";
const NACL_SEALED: &str = "8e993b9f48681273c29650ba32fc76ce48332ea7164d96a4476fb8c531a1186ac0dfc17c98dce87b4da7\
                           f011ec48c97271d2c20f9b928fe2270d6fb863d51738b48eeee314a7cc8ab932164548e526ae90224368\
                           517acfeabd6bb3732bc0e9da99832b61ca01b6de56244a9e88d5f9b37973f622a43d14a6599b1f654cb4\
                           5a74e355a5";

/// A tensor of 20 bytes that tensorizer 2.12.1 encrypted with this passphrase: its section
/// including the length field, its encrypted data, and its plain data.
const PASSPHRASE: &[u8] = b"correct horse battery staple";
const SECTION: &str = "760000000000000002002a000000000000000100010002000000000000000000010000000000020000001000\
                       f3a1171d39d5a553e85e87e373df4a9b3a0000000000000002000000200000000000d79fe4a7f216c7403ace\
                       451a5dce5d0e5bd3b4d53814841a01000000000000000383980ae4c081e466c9141efa19e574";
const DATA: &str = "9748ee45b1aad297a9eca671944e47bfcfbb01f2";
const PLAIN: &str = "ed7721d14f63517ccad453b2cfa3e34f09af27ab";

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).expect("a digit") as u8;
    hex.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

fn array<const N: usize>(hex: &str) -> [u8; N] {
    bytes(hex).try_into().expect("the length of the array")
}

fn encoded(encryption: &Encryption) -> Vec<u8> {
    let mut section = Vec::new();
    encryption.encode(&mut section);
    section
}

fn passphrase(bytes: &[u8]) -> Secret {
    Secret::passphrase(Zeroizing::new(bytes.to_vec())).expect("it is not empty")
}

#[test]
fn the_cipher_is_that_of_nacl() {
    let (key, nonce) = (DataKey::new(&array(NACL_KEY)), PieceNonce::new(array(NACL_NONCE)));
    let mut piece = bytes(NACL_MESSAGE);
    assert_eq!(key.seal(&nonce, &mut piece), array(NACL_MAC));
    assert_eq!(piece, bytes(NACL_SEALED));
    assert_eq!(key.open(&nonce, &array(NACL_MAC), &mut piece), Ok(()));
    assert_eq!(piece, bytes(NACL_MESSAGE));
}

#[test]
fn each_changed_bit_is_noticed_and_the_piece_is_left_as_it_is() {
    let key = DataKey::new(&[7; KEY_LEN]);
    let nonce = PieceNonce::new([9; NONCE_LEN]);
    let mut sealed = *b"bytes of a tensor";
    let mac = key.seal(&nonce, &mut sealed);
    for bit in 0..sealed.len() * 8 {
        let mut piece = sealed;
        piece[bit / 8] ^= 1 << (bit % 8);
        let changed = piece;
        assert_eq!(key.open(&nonce, &mac, &mut piece), Err(WrongMac));
        assert_eq!(piece, changed);
    }
    for bit in 0..MAC_LEN * 8 {
        let mut mac = mac;
        mac[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(key.open(&nonce, &mac, &mut sealed.clone()), Err(WrongMac));
    }
    assert_eq!(key.open(&nonce.of_piece(1), &mac, &mut sealed.clone()), Err(WrongMac));
    assert_eq!(DataKey::new(&[8; KEY_LEN]).open(&nonce, &mac, &mut sealed), Err(WrongMac));
}

#[test]
fn a_passphrase_opens_what_tensorizer_wrote() {
    let secret = passphrase(PASSPHRASE);
    let encryption =
        Encryption::parse(&bytes(SECTION), 20).expect("the section is right").expect("encrypted");
    assert_eq!(encoded(&encryption), bytes(SECTION));
    let key = secret.key_of(encryption.derivation.as_ref()).expect("a key is derived");
    let again = secret.key_of(encryption.derivation.as_ref()).expect("the key is kept");
    assert!(Arc::ptr_eq(&key, &again));
    let mut data = bytes(DATA);
    assert_eq!(encryption.open(&key, 0, &mut data), Ok(()));
    assert_eq!(data, bytes(PLAIN));
    let other = passphrase(b"another").key_of(encryption.derivation.as_ref()).expect("a key");
    assert_eq!(encryption.open(&other, 0, &mut bytes(DATA)), Err(WrongMac));
}

#[test]
fn a_passphrase_is_refused_if_the_key_was_not_derived_from_one() {
    let fault = passphrase(PASSPHRASE).key_of(None).expect_err("there are no parameters");
    assert_eq!(fault.kind, ErrorKind::KeyRequired);
    let key = Secret::parse_key(&[1; KEY_LEN]).expect("its length is right");
    assert!(key.key_of(None).is_ok());
}

#[test]
fn a_derivation_that_takes_too_much_is_refused_before_it_runs() {
    for (ops_limit, mem_limit) in [
        (1, 0),
        (1, (8 << 10) - 1),
        (1, (1 << 30) + 1),
        (1, 1 << 40),
        (1, u64::MAX),
        (0, 64 << 10),
        (17, 1 << 30),
        (u64::MAX, 8 << 10),
    ] {
        let derivation = KeyDerivation { ops_limit, mem_limit, salt: [0; SALT_LEN] };
        let fault = derivation.derive(b"x").expect_err("a limit is wrong");
        assert_eq!(fault.kind, ErrorKind::HeaderDecode, "{fault:?}");
    }
}

#[test]
fn secrets_are_not_printed() {
    let texts = [
        format!("{:?}", DataKey::new(&[0xab; KEY_LEN])),
        format!("{:?}", Secret::parse_key(&[0xab; KEY_LEN]).expect("its length is right")),
        format!("{:?}", passphrase(PASSPHRASE)),
    ];
    assert_eq!(texts, ["DataKey(..)", "Secret(key)", "Secret(passphrase)"]);
}

#[test]
fn the_nonce_of_a_piece_is_a_sum_of_192_bits() {
    let nonce = PieceNonce::new([0xff; NONCE_LEN]);
    assert_eq!(nonce.of_piece(0), nonce);
    assert_eq!(nonce.of_piece(1).bytes(), &[0; NONCE_LEN]);
    let mut expected = [0; NONCE_LEN];
    expected[..3].copy_from_slice(&[0xfe, 0x00, 0x01]);
    let mut first = [0; NONCE_LEN];
    first[0] = 0xff;
    assert_eq!(PieceNonce::new(first).of_piece(0xffff).bytes(), &expected);
}

/// A section with 2 pieces for 1500 bytes of data.
fn two_pieces() -> Vec<u8> {
    let encryption = Encryption {
        derivation: Some(KeyDerivation { ops_limit: 2, mem_limit: 65536, salt: [3; SALT_LEN] }),
        data_len: 1500,
        piece_len: 1024,
        nonce: PieceNonce::new([4; NONCE_LEN]),
        macs: Box::new([[5; MAC_LEN], [6; MAC_LEN]]),
        one_piece: false,
    };
    encoded(&encryption)
}

#[test]
fn a_section_with_one_fault_is_refused() {
    // Offsets in the section of `two_pieces`, wrong bytes at each offset, and the expected message.
    let faults: [(usize, &[u8], &str); 14] = [
        (0, &[0xff; 8], "the encryption takes"),
        (0, &[0x85], "the encryption takes"),
        (8, &[1], "bytes follow the last field of the encryption"),
        (8, &[3], "a part of the encryption takes"),
        (10, &[0xff; 8], "a part of the encryption takes"),
        (10, &[0x29], "bytes"),
        (18, &[77], "the type 77"),
        (18, &[2], "the encrypted pieces have"),
        (20, &[2], "the method 2"),
        (38, &[1], "the algorithm 1"),
        (42, &[15], "the salt has 15 bytes"),
        (70, &[1], "the encrypted pieces have"),
        (102, &[1], "1 MACs, 2 expected"),
        (102, &[0xff; 8], "MACs, 2 expected"),
    ];
    assert!(Encryption::parse(&two_pieces(), 1500).is_ok());
    for (offset, wrong, message) in faults {
        let mut section = two_pieces();
        section[offset..offset + wrong.len()].copy_from_slice(wrong);
        let fault = Encryption::parse(&section, 1500).expect_err("a field is wrong");
        assert!(fault.to_string().contains(message), "byte {offset}: {fault}");
    }
    for len in 0..two_pieces().len() {
        assert!(Encryption::parse(&two_pieces()[..len], 1500).is_err(), "{len} bytes");
    }
    for data_len in [0, 1, 1024, 2049, u64::MAX] {
        assert!(Encryption::parse(&two_pieces(), data_len).is_err(), "{data_len} bytes of data");
    }
}

#[test]
fn a_section_is_refused_that_has_fewer_macs_than_it_says_or_is_too_long_for_memory() {
    // The number of MACs fits the data, but the section has no MAC.
    let data_len = u64::MAX / 2;
    let mut part = [2, 0].to_vec();
    part.extend(PIECE_LEN_MIN.to_le_bytes());
    part.extend([0; NONCE_LEN]);
    part.extend(data_len.div_ceil(PIECE_LEN_MIN).to_le_bytes());
    let body = [&[1, 0], &(part.len() as u64).to_le_bytes()[..], &part].concat();
    let section = [&(body.len() as u64).to_le_bytes()[..], &body].concat();
    let fault = Encryption::parse(&section, data_len).expect_err("the MACs are missing");
    assert!(fault.to_string().contains("the list of MACs takes"), "{fault}");
    for data_len in [1 << 40, 1 << 62, u64::MAX] {
        assert_eq!(Encryption::section_len_max(data_len), SECTION_LEN_MAX);
    }
    let macs = (1_u64 << 40).div_ceil(PIECE_LEN) * MAC_LEN as u64;
    assert!(macs < SECTION_LEN_MAX, "1 TiB in pieces as they are written");
}

#[test]
fn two_parts_of_one_kind_are_refused() {
    let section = two_pieces();
    for (part, count) in [(&section[10..60], 3_u8), (&section[60..], 3)] {
        let len = section.len() + part.len();
        let mut twice = [&section[..], part].concat();
        twice[..8].copy_from_slice(&(len as u64 - 8).to_le_bytes());
        twice[8] = count;
        let fault = Encryption::parse(&twice, 1500).expect_err("a part stands twice");
        assert!(fault.to_string().contains("two parts of one kind"), "{fault}");
    }
}

#[test]
fn only_a_tensor_without_data_needs_no_encryption() {
    let mut section = Vec::new();
    Encryption::encode_none(&mut section);
    assert_eq!(Encryption::parse(&section, 0).expect("it has no data"), None);
    assert!(Encryption::parse(&section, 1).is_err());
}

#[test]
fn one_mac_over_the_whole_tensor_is_read() {
    let encryption = Encryption {
        derivation: None,
        data_len: 5000,
        piece_len: 5000,
        nonce: PieceNonce::new([4; NONCE_LEN]),
        macs: Box::new([[5; MAC_LEN]]),
        one_piece: true,
    };
    assert_eq!(
        Encryption::parse(&encoded(&encryption), 5000).expect("it is right"),
        Some(encryption.clone())
    );
    assert_eq!(encryption.cover(&(4000..4001)), 0..5000);
    assert_eq!((encryption.pieces(), encryption.piece(0)), (1, 0..5000));
}

proptest! {
    #[test]
    fn every_section_is_read_as_it_was_written(
        data_len in 1..200_000_u64,
        steps in 0..64_u64,
        derived in any::<bool>(),
        fill in any::<u8>(),
    ) {
        let piece_len = PIECE_LEN_MIN + steps * PIECE_LEN_STEP;
        let pieces = data_len.div_ceil(piece_len);
        let encryption = Encryption {
            derivation: derived.then_some(KeyDerivation {
                ops_limit: 2,
                mem_limit: 65536,
                salt: [fill; SALT_LEN],
            }),
            data_len,
            piece_len,
            nonce: PieceNonce::new([fill; NONCE_LEN]),
            macs: (0..pieces).map(|index| [index as u8 ^ fill; MAC_LEN]).collect(),
            one_piece: false,
        };
        let section = encoded(&encryption);
        prop_assert!(section.len() as u64 <= Encryption::section_len_max(data_len));
        prop_assert_eq!(Encryption::parse(&section, data_len).expect("it is right"), Some(encryption));
    }

    #[test]
    fn the_pieces_that_cover_a_range_are_whole_and_no_more_than_needed(
        data_len in 1..50_000_u64,
        steps in 0..64_u64,
        a in any::<prop::sample::Index>(),
        b in any::<prop::sample::Index>(),
    ) {
        let piece_len = PIECE_LEN_MIN + steps * PIECE_LEN_STEP;
        let encryption = Encryption {
            derivation: None,
            data_len,
            piece_len,
            nonce: PieceNonce::new([0; NONCE_LEN]),
            macs: vec![[0; MAC_LEN]; data_len.div_ceil(piece_len) as usize].into(),
            one_piece: false,
        };
        let ends = (a.index(data_len as usize) as u64, b.index(data_len as usize) as u64);
        let range = ends.0.min(ends.1)..ends.0.max(ends.1) + 1;
        let cover = encryption.cover(&range);
        prop_assert!(cover.start <= range.start && range.end <= cover.end && cover.end <= data_len);
        prop_assert!(cover.start.is_multiple_of(piece_len));
        prop_assert!(range.start - cover.start < piece_len && cover.end - range.end < piece_len);
        prop_assert!(cover.end.is_multiple_of(piece_len) || cover.end == data_len);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Encryption::parse(&bytes, 1500);
        let mut section = two_pieces();
        for (index, byte) in bytes.iter().enumerate() {
            let offset = usize::from(*byte) % section.len();
            section[offset] ^= index as u8;
        }
        let _ = Encryption::parse(&section, 1500);
    }
}
