//! The cipher Salsa20, computed for eight blocks at a time on processors with AVX2. With AVX-512 it
//! is faster, because one instruction rotates all words of a vector.
//!
//! The crate `salsa20` computes one block at a time, which takes more than three times as long. It
//! is used here for the bytes before and after groups of eight whole blocks, and for all bytes on
//! other processors.

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

/// Number of bytes of the key stream that are computed at a time.
const WIDE_LEN: usize = 8 * BLOCK_LEN;

/// The constants of Salsa20, which are the words on the diagonal of the state.
const CONSTANTS: [u32; 4] = [0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574];

/// A key stream of Salsa20. Its memory is wiped when it is dropped.
pub(super) struct WideSalsa20 {
    narrow: Salsa20,
    /// The state of the first block.
    state: Zeroizing<[u32; 16]>,
    /// The function that computes eight blocks, if this processor supports one.
    make_blocks: Option<MakeBlocks>,
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
        WideSalsa20 {
            narrow: Salsa20::new(key, iv),
            state,
            // In builds without inlining the crate is faster, because it is optimized in debug
            // builds too.
            make_blocks: wide_functions()
                .into_iter()
                .flatten()
                .next()
                .filter(|_| !cfg!(debug_assertions)),
        }
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
        let is_short = bytes.len() < front_len as usize + WIDE_LEN;
        let Some(make_blocks) = self.make_blocks.filter(|_| !is_short) else {
            return self.narrow.try_apply_keystream_inout(bytes);
        };
        let (front, bytes) = bytes.split_at(front_len as usize);
        self.narrow.try_apply_keystream_inout(front)?;
        let wide_len = bytes.len() / WIDE_LEN * WIDE_LEN;
        let (mut wide, tail) = bytes.split_at(wide_len);
        let mut stream = Zeroizing::new([0; WIDE_LEN]);
        let mut number = (position + front_len) / BLOCK_LEN as u64;
        for start in (0..wide_len).step_by(WIDE_LEN) {
            make_blocks(&self.state, number, &mut stream);
            // `xor_in2out` would work on single bytes if input and output are the same buffer.
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

/// A function that computes eight blocks of a key stream, from a state and the number of the first block.
type MakeBlocks = fn(&[u32; 16], u64, &mut [u8; WIDE_LEN]);

/// Functions that compute eight blocks of a key stream, the fastest one first. `None` stands for a function that this
/// processor cannot run.
#[cfg(target_arch = "x86_64")]
fn wide_functions() -> [Option<MakeBlocks>; 2] {
    let has_avx2 = is_x86_feature_detected!("avx2");
    let has_avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl");
    let with_avx512: MakeBlocks = |state, first, stream| {
        // SAFETY: this closure is returned only if the processor has the features that the function
        // needs.
        unsafe { avx512::make_blocks(state, first, stream) };
    };
    let with_avx2: MakeBlocks = |state, first, stream| {
        // SAFETY: this closure is returned only if the processor has the feature that the function
        // needs.
        unsafe { avx2::make_blocks(state, first, stream) };
    };
    [(has_avx2 && has_avx512).then_some(with_avx512), has_avx2.then_some(with_avx2)]
}

/// There is no such function for this architecture.
#[cfg(not(target_arch = "x86_64"))]
fn wide_functions() -> [Option<MakeBlocks>; 0] {
    []
}

/// Defines the functions for the CPU features `$features`. They rotate words with the function `$rotated`. They use
/// no closures, because closures in `map` and `zip` would be compiled for all processors.
#[cfg(target_arch = "x86_64")]
macro_rules! eight_blocks {
    ($features:literal, $rotated:ident) => {
        use std::arch::x86_64::{
            __m256i, _mm256_add_epi32, _mm256_permute2x128_si256, _mm256_set1_epi32,
            _mm256_setr_epi32, _mm256_setzero_si256, _mm256_storeu_si256, _mm256_unpackhi_epi32,
            _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64, _mm256_xor_si256,
        };

        use super::{BLOCK_LEN, WIDE_LEN};

        /// Sixteen vectors, one for each word of the state. Each vector has this word of all eight
        /// blocks.
        type Words = [__m256i; 16];

        /// Computes `words[to] ^= rotate_left(words[first] + words[second], LEFT)`.
        /// `RIGHT` has to be `32 - LEFT`.
        #[target_feature(enable = $features)]
        #[inline]
        fn mix<const LEFT: i32, const RIGHT: i32>(
            words: &mut Words,
            [to, first, second]: [usize; 3],
        ) {
            let sum = _mm256_add_epi32(words[first], words[second]);
            words[to] = _mm256_xor_si256(words[to], $rotated::<LEFT, RIGHT>(sum));
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn quarter_round(words: &mut Words, [a, b, c, d]: [usize; 4]) {
            mix::<7, 25>(words, [b, a, d]);
            mix::<9, 23>(words, [c, b, a]);
            mix::<13, 19>(words, [d, c, b]);
            mix::<18, 14>(words, [a, d, c]);
        }

        #[target_feature(enable = $features)]
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

        /// Stores eight words, from `first` on, of each block at their place in the block.
        #[target_feature(enable = $features)]
        #[inline]
        fn store(words: &Words, first: usize, stream: &mut [u8; WIDE_LEN]) {
            let mut pairs = [_mm256_setzero_si256(); 8];
            for pair in 0..4 {
                let (one, next) = (words[first + 2 * pair], words[first + 2 * pair + 1]);
                pairs[2 * pair] = _mm256_unpacklo_epi32(one, next);
                pairs[2 * pair + 1] = _mm256_unpackhi_epi32(one, next);
            }
            // `columns[c]` for `c` below 4 has words 0 to 3 of blocks `c` and `c + 4`. `columns[4 + c]` has words 4
            // to 7 of them.
            let mut columns = [_mm256_setzero_si256(); 8];
            for half in 0..2 {
                for high in 0..2 {
                    let (one, next) = (pairs[4 * half + high], pairs[4 * half + 2 + high]);
                    columns[4 * half + 2 * high] = _mm256_unpacklo_epi64(one, next);
                    columns[4 * half + 2 * high + 1] = _mm256_unpackhi_epi64(one, next);
                }
            }
            for block in 0..8 {
                let (upper, lower) = (columns[block % 4], columns[4 + block % 4]);
                let column = match block {
                    0..4 => _mm256_permute2x128_si256::<0x20>(upper, lower),
                    _ => _mm256_permute2x128_si256::<0x31>(upper, lower),
                };
                let place = &mut stream[block * BLOCK_LEN + 4 * first..][..BLOCK_LEN / 2];
                // SAFETY: `place` has 32 bytes. The store needs no alignment.
                unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), column) };
            }
        }

        #[target_feature(enable = $features)]
        pub(super) fn make_blocks(state: &[u32; 16], first: u64, stream: &mut [u8; WIDE_LEN]) {
            let mut start = [_mm256_setzero_si256(); 16];
            for word in 0..16 {
                start[word] = _mm256_set1_epi32(state[word].cast_signed());
            }
            let (mut low, mut high) = ([0; 8], [0; 8]);
            for block in 0..8 {
                let number = first.wrapping_add(block as u64);
                low[block] = (number as u32).cast_signed();
                high[block] = ((number >> 32) as u32).cast_signed();
            }
            let [a, b, c, d, e, f, g, h] = low;
            start[8] = _mm256_setr_epi32(a, b, c, d, e, f, g, h);
            let [a, b, c, d, e, f, g, h] = high;
            start[9] = _mm256_setr_epi32(a, b, c, d, e, f, g, h);
            let mut words = start;
            for _ in 0..10 {
                double_round(&mut words);
            }
            for word in 0..16 {
                words[word] = _mm256_add_epi32(words[word], start[word]);
            }
            store(&words, 0, stream);
            store(&words, 8, stream);
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{_mm256_or_si256, _mm256_slli_epi32, _mm256_srli_epi32};

    #[target_feature(enable = "avx2")]
    #[inline]
    fn by_shifts<const LEFT: i32, const RIGHT: i32>(words: __m256i) -> __m256i {
        _mm256_or_si256(_mm256_slli_epi32::<LEFT>(words), _mm256_srli_epi32::<RIGHT>(words))
    }

    eight_blocks!("avx2", by_shifts);
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::_mm256_rol_epi32;

    #[target_feature(enable = "avx2,avx512f,avx512vl")]
    #[inline]
    fn at_once<const LEFT: i32, const RIGHT: i32>(words: __m256i) -> __m256i {
        _mm256_rol_epi32::<LEFT>(words)
    }

    eight_blocks!("avx2,avx512f,avx512vl", at_once);
}

#[cfg(test)]
mod tests;
