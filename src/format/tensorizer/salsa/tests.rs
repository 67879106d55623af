//! Tests that compare the cipher with the crate `salsa20`, which computes one block at a time.

use proptest::prelude::*;

use super::*;

fn ciphers(key: [u8; 32], nonce: [u8; 8]) -> (WideSalsa20, Salsa20) {
    let (key, nonce) = (key.into(), nonce.into());
    let mut wide = WideSalsa20::new(&key, &nonce);
    // Debug builds do not use these functions, so the test sets one.
    wide.make_blocks = wide_functions().into_iter().flatten().next();
    (wide, Salsa20::new(&key, &nonce))
}

proptest! {
    #[test]
    fn the_key_stream_is_that_of_the_crate_however_it_is_cut(
        key: [u8; 32],
        nonce: [u8; 8],
        lengths in proptest::collection::vec(0..3 * WIDE_LEN, 1..8),
        code in 0usize..3,
    ) {
        let (mut wide, mut narrow) = ciphers(key, nonce);
        let (mut apart, _) = ciphers(key, nonce);
        // One of the functions that this processor can run, or none.
        wide.make_blocks = wide_functions().into_iter().flatten().nth(code);
        for (number, len) in lengths.into_iter().enumerate() {
            let mut found = vec![number as u8; len];
            let (plain, mut expected) = (found.clone(), found.clone());
            wide.apply_keystream(&mut found);
            narrow.apply_keystream(&mut expected);
            prop_assert_eq!(found, &expected[..]);
            // The input and the output are different buffers.
            let mut found = vec![0xEE; len];
            apart.apply_keystream_b2b(&plain, &mut found).unwrap();
            prop_assert_eq!(found, expected);
        }
    }
}

#[test]
fn the_numbers_of_blocks_pass_32_bits() {
    let (mut wide, mut narrow) = ciphers([1; 32], [2; 8]);
    let near = (u64::from(u32::MAX) - 5) * BLOCK_LEN as u64;
    wide.narrow.seek(near);
    narrow.seek(near);
    let (mut found, mut expected) = ([0; 3 * WIDE_LEN], [0; 3 * WIDE_LEN]);
    wide.apply_keystream(&mut found);
    narrow.apply_keystream(&mut expected);
    assert_eq!(found, expected);
}
