//! The cipher Salsa20 with eight blocks at a time, on processors with AVX2.
//!
//! The crate makes one block at a time, which takes more than three times as long. It makes the
//! bytes before and behind eight whole blocks here, and all of them on other processors.

use crypto_secretbox::cipher::inout::InOutBuf;
use crypto_secretbox::cipher::{
    Iv, IvSizeUser, Key, KeyIvInit, KeySizeUser, StreamCipher, StreamCipherError, StreamCipherSeek,
};
use crypto_secretbox::consts::{U8, U16, U32};
use crypto_secretbox::{Kdf, XSalsa20Poly1305};
use salsa20::Salsa20;
use salsa20::cipher::generic_array::GenericArray;
use zeroize::Zeroizing;

/// Length of a block of the key stream in bytes.
const BLOCK_LEN: usize = 64;

/// Bytes of the key stream that are made at a time.
const WIDE_LEN: usize = 8 * BLOCK_LEN;

/// The words at the corners of the state.
const CONSTANTS: [u32; 4] = [0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574];

/// A key stream of Salsa20. Its memory is wiped when it is dropped.
pub(super) struct WideSalsa20 {
    narrow: Salsa20,
    /// The state of the first block.
    state: Zeroizing<[u32; 16]>,
}

impl KeySizeUser for WideSalsa20 {
    type KeySize = U32;
}

impl IvSizeUser for WideSalsa20 {
    type IvSize = U8;
}

impl KeyIvInit for WideSalsa20 {
    fn new(key: &Key<Self>, iv: &Iv<Self>) -> WideSalsa20 {
        let mut state = Zeroizing::new([0; 16]);
        let places = [1, 2, 3, 4, 11, 12, 13, 14, 6, 7];
        for (place, word) in places.into_iter().zip(key.chunks_exact(4).chain(iv.chunks_exact(4))) {
            state[place] = word.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
        }
        (state[0], state[5], state[10], state[15]) =
            (CONSTANTS[0], CONSTANTS[1], CONSTANTS[2], CONSTANTS[3]);
        WideSalsa20 { narrow: Salsa20::new(key, iv), state }
    }
}

impl Kdf for WideSalsa20 {
    fn kdf(key: &crypto_secretbox::Key, nonce: &GenericArray<u8, U16>) -> crypto_secretbox::Key {
        XSalsa20Poly1305::kdf(key, nonce)
    }
}

impl StreamCipher for WideSalsa20 {
    fn try_apply_keystream_inout(
        &mut self,
        bytes: InOutBuf<'_, '_, u8>,
    ) -> Result<(), StreamCipherError> {
        let position: u64 = self.narrow.try_current_pos().map_err(|_| StreamCipherError)?;
        let front_len = position.next_multiple_of(BLOCK_LEN as u64) - position;
        if bytes.len() < front_len as usize + WIDE_LEN {
            return self.narrow.try_apply_keystream_inout(bytes);
        }
        let (front, bytes) = bytes.split_at(front_len as usize);
        self.narrow.try_apply_keystream_inout(front)?;
        let wide_len = bytes.len() / WIDE_LEN * WIDE_LEN;
        let (mut wide, tail) = bytes.split_at(wide_len);
        let mut stream = Zeroizing::new([0; WIDE_LEN]);
        let mut number = (position + front_len) / BLOCK_LEN as u64;
        for start in (0..wide_len).step_by(WIDE_LEN) {
            if !make_blocks(&self.state, number, &mut stream) {
                // No processor makes some of them only.
                self.narrow.try_apply_keystream_inout(wide)?;
                return self.narrow.try_apply_keystream_inout(tail);
            }
            // `xor_in2out` takes single bytes if both buffers are the same.
            let range = start..start + WIDE_LEN;
            let bytes = &wide.get_in()[range.clone()];
            stream.iter_mut().zip(bytes).for_each(|(byte, &other)| *byte ^= other);
            wide.get_out()[range].copy_from_slice(&*stream);
            number += (WIDE_LEN / BLOCK_LEN) as u64;
        }
        let passed = self.narrow.try_seek(number * BLOCK_LEN as u64);
        passed.map_err(|_| StreamCipherError)?;
        self.narrow.try_apply_keystream_inout(tail)
    }
}

/// Makes the eight blocks of a key stream from the one with the number `first` on. Returns whether
/// the processor can do that; `stream` is as before if not.
#[cfg(target_arch = "x86_64")]
fn make_blocks(state: &[u32; 16], first: u64, stream: &mut [u8; WIDE_LEN]) -> bool {
    let can = is_x86_feature_detected!("avx2");
    if can {
        // SAFETY: the processor has AVX2, the only feature that the function is compiled for.
        unsafe { avx2::make_blocks(state, first, stream) };
    }
    can
}

/// Makes no blocks: there is no code for this architecture.
#[cfg(not(target_arch = "x86_64"))]
fn make_blocks(_state: &[u32; 16], _first: u64, _stream: &mut [u8; WIDE_LEN]) -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _mm256_add_epi32, _mm256_or_si256, _mm256_permute2x128_si256, _mm256_set1_epi32,
        _mm256_setr_epi32, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_storeu_si256,
        _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
        _mm256_xor_si256,
    };

    use super::{BLOCK_LEN, WIDE_LEN};

    /// The word of each of the eight blocks, for each of the sixteen words of a state.
    type Words = [__m256i; 16];

    /// `$to ^= rotate_left($first + $second, $bits)`.
    macro_rules! mix {
        ($words:ident[$to:ident] ^= ($first:ident + $second:ident) <<< $bits:literal) => {
            let sum = _mm256_add_epi32($words[$first], $words[$second]);
            let (left, right) =
                (_mm256_slli_epi32::<$bits>(sum), _mm256_srli_epi32::<{ 32 - $bits }>(sum));
            $words[$to] = _mm256_xor_si256($words[$to], _mm256_or_si256(left, right));
        };
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn quarter_round(words: &mut Words, [a, b, c, d]: [usize; 4]) {
        mix!(words[b] ^= (a + d) <<< 7);
        mix!(words[c] ^= (b + a) <<< 9);
        mix!(words[d] ^= (c + b) <<< 13);
        mix!(words[a] ^= (d + c) <<< 18);
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn double_round(words: &mut Words) {
        quarter_round(words, [0, 4, 8, 12]);
        quarter_round(words, [5, 9, 13, 1]);
        quarter_round(words, [10, 14, 2, 6]);
        quarter_round(words, [15, 3, 7, 11]);
        quarter_round(words, [0, 1, 2, 3]);
        quarter_round(words, [5, 6, 7, 4]);
        quarter_round(words, [10, 11, 8, 9]);
        quarter_round(words, [15, 12, 13, 14]);
    }

    /// Eight rows of eight words, as columns.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn transposed(rows: &[__m256i]) -> [__m256i; 8] {
        let pairs = [0, 2, 4, 6].map(|row| {
            let (first, second) = (rows[row], rows[row + 1]);
            [_mm256_unpacklo_epi32(first, second), _mm256_unpackhi_epi32(first, second)]
        });
        let [upper, lower] = [0, 2].map(|pair| {
            let ([low, high], [other_low, other_high]) = (pairs[pair], pairs[pair + 1]);
            [
                _mm256_unpacklo_epi64(low, other_low),
                _mm256_unpackhi_epi64(low, other_low),
                _mm256_unpacklo_epi64(high, other_high),
                _mm256_unpackhi_epi64(high, other_high),
            ]
        });
        let mut columns = [rows[0]; 8];
        for column in 0..4 {
            let (upper, lower) = (upper[column], lower[column]);
            columns[column] = _mm256_permute2x128_si256::<0x20>(upper, lower);
            columns[column + 4] = _mm256_permute2x128_si256::<0x31>(upper, lower);
        }
        columns
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn make_blocks(state: &[u32; 16], first: u64, stream: &mut [u8; WIDE_LEN]) {
        let mut start = state.map(|word| _mm256_set1_epi32(word.cast_signed()));
        let numbers: [u64; 8] = std::array::from_fn(|block| first.wrapping_add(block as u64));
        let [a, b, c, d, e, f, g, h] = numbers.map(|number| (number as u32).cast_signed());
        start[8] = _mm256_setr_epi32(a, b, c, d, e, f, g, h);
        let [a, b, c, d, e, f, g, h] = numbers.map(|number| ((number >> 32) as u32).cast_signed());
        start[9] = _mm256_setr_epi32(a, b, c, d, e, f, g, h);
        let mut words = start;
        for _ in 0..10 {
            double_round(&mut words);
        }
        for (word, start) in words.iter_mut().zip(start) {
            *word = _mm256_add_epi32(*word, start);
        }
        let halves = transposed(&words[..8]).into_iter().zip(transposed(&words[8..]));
        for (block, (front, back)) in stream.chunks_exact_mut(BLOCK_LEN).zip(halves) {
            let (front_bytes, back_bytes) = block.split_at_mut(BLOCK_LEN / 2);
            // SAFETY: both slices have 32 bytes, the half of a block. The store needs no alignment.
            unsafe {
                _mm256_storeu_si256(front_bytes.as_mut_ptr().cast(), front);
                _mm256_storeu_si256(back_bytes.as_mut_ptr().cast(), back);
            }
        }
    }
}

#[cfg(test)]
mod tests;
