//! Casts elements from one floating point type to another with the results of torch on the CPU.
//!
//! Values are rounded to the nearest value, ties to even. Values that are too large become infinite. Types
//! wider than `F32` are narrowed through `F32`. For all these values, torch returns the same bits on every
//! processor. The bits of a NaN, however, depend on the processor and even on the length of the tensor. The
//! casts here return the bits that torch returns for a long tensor on x86-64 with AVX2 or AVX-512. For example,
//! a NaN that is narrowed to `BF16` becomes `0xFFFF` from some types and `0x7FC0` from others.
//!
//! `src/device/cast.cu` has functions with the same names for GPUs. They return the same bits.

use std::fmt;
use std::ops::Range;

use crate::dtype::Dtype;

/// A cast from one element type to another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cast {
    /// Index in [`PAIRS`].
    pair: u8,
}

impl Cast {
    /// The cast from one type to another, `None` if there is none. There is no cast from a type to itself.
    pub fn new(from: Dtype, to: Dtype) -> Option<Cast> {
        if from == to {
            return None;
        }
        let pair = PAIRS.iter().position(|pair| (pair.from, pair.to) == (from, to))?;
        Some(Cast { pair: pair as u8 })
    }

    /// Type of the elements before the cast.
    pub fn from(self) -> Dtype {
        self.pair().from
    }

    /// Type of the elements after the cast.
    pub fn to(self) -> Dtype {
        self.pair().to
    }

    /// Length in bytes of the result of a cast of `len` bytes, which are whole elements.
    pub fn len_after(self, len: u64) -> u64 {
        len / (self.from().bits() / 8) * (self.to().bits() / 8)
    }

    /// Length in bytes of the elements whose cast has `len` bytes.
    pub fn len_before(self, len: u64) -> u64 {
        len / (self.to().bits() / 8) * (self.from().bits() / 8)
    }

    /// The byte range, before the cast, of the elements that contain bytes `range` after the cast.
    pub fn elements_before(self, range: &Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return 0..0;
        }
        let (width, out) = (self.from().bits() / 8, self.to().bits() / 8);
        range.start / out * width..range.end.div_ceil(out) * width
    }

    /// Name of the GPU kernel that does the same cast.
    pub fn kernel(self) -> &'static str {
        self.pair().kernel
    }

    /// Casts all elements of `from`, which are little-endian and need no alignment.
    ///
    /// # Panics
    ///
    /// Panics if the two slices do not hold the same whole number of elements.
    pub fn convert(self, from: &[u8], to: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, which is the only feature that the function is compiled for.
            return unsafe { (self.pair().convert_avx2)(from, to) };
        }
        self.convert_anywhere(from, to);
    }

    /// Casts like `convert`, but only with instructions that every processor of the architecture has.
    ///
    /// # Panics
    ///
    /// Panics if the two slices do not hold the same whole number of elements.
    #[doc(hidden)]
    pub fn convert_anywhere(self, from: &[u8], to: &mut [u8]) {
        (self.pair().convert)(from, to);
    }

    /// Casts `from`, which holds whole elements, and writes a part of the results to `window`. The results
    /// begin at byte `start` of the target. `window` holds the bytes of the target from byte `window_start` on.
    /// Results outside the window are not written. If an element crosses an edge of the window, only its bytes
    /// inside the window are written.
    pub fn convert_into(self, from: &[u8], start: u64, window: &mut [u8], window_start: u64) {
        let (width, out) = (self.from().bits() / 8, self.to().bits() / 8);
        let end = start + self.len_after(from.len() as u64);
        let inside = start.max(window_start)..end.min(window_start + window.len() as u64);
        let mut place = inside.start;
        while place < inside.end {
            let element = (place - start) / out;
            let begins = start + element * out;
            let whole = (inside.end - begins) / out;
            let (count, skipped) = if place > begins || whole == 0 {
                (1, (place - begins) as usize)
            } else {
                (whole, 0)
            };
            let elements = &from[(element * width) as usize..((element + count) * width) as usize];
            let stop = inside.end.min(begins + count * out);
            let target = (place - window_start) as usize..(stop - window_start) as usize;
            if skipped == 0 && target.len() as u64 == count * out {
                self.convert(elements, &mut window[target]);
            } else {
                let mut one = [0; 8];
                self.convert(elements, &mut one[..out as usize]);
                let len = target.len();
                window[target].copy_from_slice(&one[skipped..skipped + len]);
            }
            place = stop;
        }
    }

    fn pair(self) -> &'static Pair {
        &PAIRS[usize::from(self.pair)]
    }
}

impl fmt::Debug for Cast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.from(), self.to())
    }
}

/// A cast: its two types, its GPU kernel and its function.
struct Pair {
    from: Dtype,
    to: Dtype,
    kernel: &'static str,
    convert: fn(&[u8], &mut [u8]),
    /// The same function, compiled for processors with AVX2. It returns the same bits, because all processors
    /// round the arithmetic of floats in the same way, and because integer operations choose the bits of a NaN.
    #[cfg(target_arch = "x86_64")]
    convert_avx2: unsafe fn(&[u8], &mut [u8]),
}

/// A row of [`PAIRS`]: the two integer types that hold the bits of an element, and the function that converts
/// one to the other.
macro_rules! pair {
    ($from:ident $to:ident $kernel:literal $bits:ty => $out:ty, $convert:expr) => {
        Pair {
            from: Dtype::$from,
            to: Dtype::$to,
            kernel: $kernel,
            convert: |from, to| {
                let convert: fn($bits) -> $out = $convert;
                map(from, to, |bytes| convert(<$bits>::from_le_bytes(bytes)).to_le_bytes());
            },
            #[cfg(target_arch = "x86_64")]
            convert_avx2: {
                #[target_feature(enable = "avx2")]
                fn convert_avx2(from: &[u8], to: &mut [u8]) {
                    let convert: fn($bits) -> $out = $convert;
                    map(from, to, |bytes| convert(<$bits>::from_le_bytes(bytes)).to_le_bytes());
                }
                convert_avx2
            },
        }
    };
}

static PAIRS: &[Pair] = &[
    pair!(F64 F32 "cast_f64_f32" u64 => u32, f64_to_f32),
    pair!(F64 F16 "cast_f64_f16" u64 => u16, |x| f32_to_f16(f64_to_f32(x))),
    pair!(F64 Bf16 "cast_f64_bf16" u64 => u16, |x| f32_to_bf16(f64_to_f32(x), 0xFFFF)),
    pair!(F32 F16 "cast_f32_f16" u32 => u16, f32_to_f16),
    pair!(F32 Bf16 "cast_f32_bf16" u32 => u16, |x| f32_to_bf16(x, 0xFFFF)),
    pair!(F16 F32 "cast_f16_f32" u16 => u32, f16_to_f32),
    pair!(F16 Bf16 "cast_f16_bf16" u16 => u16, |x| f32_to_bf16(f16_to_f32(x), 0x7FC0)),
    pair!(Bf16 F32 "cast_bf16_f32" u16 => u32, bf16_to_f32),
    pair!(Bf16 F16 "cast_bf16_f16" u16 => u16, |x| f32_to_f16(bf16_to_f32(x))),
    pair!(F8E4M3 F32 "cast_f8_e4m3_f32" u8 => u32, |x| E4M3.f32[usize::from(x)]),
    pair!(F8E4M3 F16 "cast_f8_e4m3_f16" u8 => u16, |x| E4M3.f16[usize::from(x)]),
    pair!(F8E4M3 Bf16 "cast_f8_e4m3_bf16" u8 => u16, |x| E4M3.bf16[usize::from(x)]),
    pair!(F8E5M2 F32 "cast_f8_e5m2_f32" u8 => u32, |x| E5M2.f32[usize::from(x)]),
    pair!(F8E5M2 F16 "cast_f8_e5m2_f16" u8 => u16, |x| E5M2.f16[usize::from(x)]),
    pair!(F8E5M2 Bf16 "cast_f8_e5m2_bf16" u8 => u16, |x| E5M2.bf16[usize::from(x)]),
    pair!(F8E4M3Fnuz F32 "cast_f8_e4m3fnuz_f32" u8 => u32, |x| E4M3FNUZ.f32[usize::from(x)]),
    pair!(F8E4M3Fnuz F16 "cast_f8_e4m3fnuz_f16" u8 => u16, |x| E4M3FNUZ.f16[usize::from(x)]),
    pair!(F8E4M3Fnuz Bf16 "cast_f8_e4m3fnuz_bf16" u8 => u16, |x| E4M3FNUZ.bf16[usize::from(x)]),
    pair!(F8E5M2Fnuz F32 "cast_f8_e5m2fnuz_f32" u8 => u32, |x| E5M2FNUZ.f32[usize::from(x)]),
    pair!(F8E5M2Fnuz F16 "cast_f8_e5m2fnuz_f16" u8 => u16, |x| E5M2FNUZ.f16[usize::from(x)]),
    pair!(F8E5M2Fnuz Bf16 "cast_f8_e5m2fnuz_bf16" u8 => u16, |x| E5M2FNUZ.bf16[usize::from(x)]),
    pair!(F8E8M0 F32 "cast_f8_e8m0_f32" u8 => u32, |x| E8M0.f32[usize::from(x)]),
    pair!(F8E8M0 F16 "cast_f8_e8m0_f16" u8 => u16, |x| E8M0.f16[usize::from(x)]),
    pair!(F8E8M0 Bf16 "cast_f8_e8m0_bf16" u8 => u16, |x| E8M0.bf16[usize::from(x)]),
];

/// Converts elements of `A` bytes to elements of `B` bytes. The compiler vectorizes this function for the
/// processor features of the function into which it is inlined.
#[inline(always)]
fn map<const A: usize, const B: usize>(
    from: &[u8],
    to: &mut [u8],
    convert: impl Fn([u8; A]) -> [u8; B],
) {
    let (inputs, rest) = from.as_chunks::<A>();
    let (outputs, rest_out) = to.as_chunks_mut::<B>();
    assert!(
        inputs.len() == outputs.len() && rest.is_empty() && rest_out.is_empty(),
        "a cast of {A}-byte to {B}-byte elements from {} to {} bytes",
        from.len(),
        to.len()
    );
    for (input, output) in inputs.iter().zip(outputs) {
        *output = convert(*input);
    }
}

// ---------------------------------------------------------------------------------------------
// Below, elements are integers with the bits of a float. Rust does not specify the bits of a NaN after an
// operation on floats.

const SIGN: u32 = 0x8000_0000;
const ABS: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;
const QUIET: u32 = 0x0040_0000;

const fn f64_to_f32(bits: u64) -> u32 {
    let rounded = (f64::from_bits(bits) as f32).to_bits();
    let nan = (bits >> 32) as u32 & SIGN | INFINITY | QUIET | (bits >> 29) as u32 & 0x007F_FFFF;
    if bits << 1 > 0xFFE0_0000_0000_0000 { nan } else { rounded }
}

const fn bf16_to_f32(bits: u16) -> u32 {
    (bits as u32) << 16
}

const fn f32_to_bf16(bits: u32, nan: u16) -> u16 {
    let half = 0x7FFF + ((bits >> 16) & 1);
    if bits & ABS > INFINITY { nan } else { (bits.wrapping_add(half) >> 16) as u16 }
}

const fn f32_to_f16(bits: u32) -> u16 {
    let abs = bits & ABS;
    // Below 2^-14 the last bit of the result stands for 2^-24. The last bit of 0.5 in `F32` also stands for
    // 2^-24, so the addition rounds to it.
    let tiny = (f32::from_bits(abs) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
    let normal = abs.wrapping_sub(112 << 23).wrapping_add(0xFFF + ((abs >> 13) & 1)) >> 13;
    let finite = if abs < 0x3880_0000 { tiny } else { normal };
    let nan = 0x7E00 | ((abs >> 13) & 0x3FF);
    let special = if abs > INFINITY { nan } else { 0x7C00 };
    let magnitude = if abs >= 0x4780_0000 { special } else { finite };
    (((bits >> 16) & 0x8000) | magnitude) as u16
}

const fn f16_to_f32(bits: u16) -> u32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let abs = (bits as u32 & 0x7FFF) << 13;
    // A subnormal is a fraction of 2^-14 without the leading one. `|` adds the leading one, and the subtraction
    // removes it.
    let tiny = (f32::from_bits(abs | 0x3880_0000) - f32::from_bits(0x3880_0000)).to_bits();
    let special = if abs >= 0x0F80_0000 { 112 << 23 } else { 0 };
    let quiet = if abs > 0x0F80_0000 { QUIET } else { 0 };
    let large = (abs + (112 << 23) + special) | quiet;
    sign | if abs < 0x0080_0000 { tiny } else { large }
}

/// The results for the 256 values of an 8-bit type, in the types to which it can be cast.
struct Table {
    f32: [u32; 256],
    f16: [u16; 256],
    bf16: [u16; 256],
}

macro_rules! table {
    ($decode:ident) => {{
        let mut table = Table { f32: [0; 256], f16: [0; 256], bf16: [0; 256] };
        let mut byte = 0;
        while byte < 256 {
            let bits = $decode(byte as u8);
            table.f32[byte] = bits;
            table.f16[byte] = f32_to_f16(bits);
            table.bf16[byte] = f32_to_bf16(bits, 0x7FC0);
            byte += 1;
        }
        table
    }};
}

static E4M3: Table = table!(e4m3);
static E5M2: Table = table!(e5m2);
static E4M3FNUZ: Table = table!(e4m3fnuz);
static E5M2FNUZ: Table = table!(e5m2fnuz);
static E8M0: Table = table!(e8m0);

/// The NaN for types that have only one NaN, without a sign. It is a signaling NaN.
const SIGNALLING: u32 = INFINITY | 1;

const fn e4m3(byte: u8) -> u32 {
    match byte & 0x7F {
        0x7F => sign(byte) | 0x7FF0_0000,
        _ => finite(byte, 3, 7),
    }
}

const fn e5m2(byte: u8) -> u32 {
    match byte & 0x7F {
        0x7C => sign(byte) | INFINITY,
        0x7D..=0x7F => sign(byte) | INFINITY | QUIET | (byte as u32 & 3) << 21,
        _ => finite(byte, 2, 15),
    }
}

const fn e4m3fnuz(byte: u8) -> u32 {
    if byte == 0x80 { SIGNALLING } else { finite(byte, 3, 8) }
}

const fn e5m2fnuz(byte: u8) -> u32 {
    if byte == 0x80 { SIGNALLING } else { finite(byte, 2, 16) }
}

const fn e8m0(byte: u8) -> u32 {
    match byte {
        0 => 0x0040_0000, // 2^-127, subnormal
        0xFF => SIGNALLING,
        _ => (byte as u32) << 23,
    }
}

const fn sign(byte: u8) -> u32 {
    (byte as u32 & 0x80) << 24
}

/// Converts an 8-bit float that has a sign, an exponent and `width` bits of fraction, like [`f16_to_f32`].
const fn finite(byte: u8, width: u32, bias: u32) -> u32 {
    let abs = (byte as u32 & 0x7F) << (23 - width);
    let least = (128 - bias) << 23;
    let tiny = (f32::from_bits(abs | least) - f32::from_bits(least)).to_bits();
    let normal = abs + ((127 - bias) << 23);
    sign(byte) | if abs < 0x0080_0000 { tiny } else { normal }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(from: Dtype, to: Dtype, bytes: &[u8]) -> Vec<u8> {
        let cast = Cast::new(from, to).expect("there is such a cast");
        let mut result = vec![0; bytes.len() * to.bits() as usize / from.bits() as usize];
        cast.convert(bytes, &mut result);
        result
    }

    #[test]
    fn ties_go_to_even() {
        let below = [0x00, 0x80, 0x80, 0x3F]; // 1 + 2^-8
        let above = [0x00, 0x80, 0x81, 0x3F]; // 1 + 3 * 2^-8
        assert_eq!(one(Dtype::F32, Dtype::Bf16, &below), [0x80, 0x3F]);
        assert_eq!(one(Dtype::F32, Dtype::Bf16, &above), [0x82, 0x3F]);
    }

    #[test]
    fn what_an_f16_cannot_hold_is_infinite() {
        assert_eq!(one(Dtype::F32, Dtype::F16, &65519f32.to_le_bytes()), [0xFF, 0x7B]);
        assert_eq!(one(Dtype::F32, Dtype::F16, &65520f32.to_le_bytes()), [0x00, 0x7C]);
        assert_eq!(one(Dtype::Bf16, Dtype::F16, &[0x80, 0xC7]), [0x00, 0xFC]);
    }

    #[test]
    fn elements_may_lie_at_any_address() {
        let values: Vec<u8> = (0..999u32).flat_map(|n| (n as f32 / 7.0).to_le_bytes()).collect();
        let expected = one(Dtype::F32, Dtype::F16, &values);
        let cast = Cast::new(Dtype::F32, Dtype::F16).expect("there is such a cast");
        for shift in 1..4 {
            let from = [&vec![0; shift], values.as_slice()].concat();
            let mut to = vec![0xAA; shift + expected.len() + 1];
            let end = shift + expected.len();
            cast.convert(&from[shift..], &mut to[shift..end]);
            assert_eq!(to[shift..end], expected);
            assert!(to[..shift].iter().chain(&to[end..]).all(|byte| *byte == 0xAA));
        }
    }

    #[test]
    fn a_window_gets_its_part_of_the_results_and_no_other_byte() {
        for (from, to) in
            [(Dtype::F32, Dtype::Bf16), (Dtype::Bf16, Dtype::F32), (Dtype::F64, Dtype::F16)]
        {
            let count = 9;
            let (width, out) = (from.bits() as usize / 8, to.bits() as usize / 8);
            let bytes: Vec<u8> = (0..count * width).map(|at| (at * 37 % 120) as u8).collect();
            let cast = Cast::new(from, to).expect("there is such a cast");
            let mut all = vec![0; count * out];
            cast.convert(&bytes, &mut all);
            let start = 5;
            for first in 0..start + all.len() + 3 {
                for len in 0..all.len() + 8 {
                    let mut window = vec![0xAA; len];
                    cast.convert_into(&bytes, start as u64, &mut window, first as u64);
                    for (at, byte) in window.iter().enumerate() {
                        let wanted = (first + at).checked_sub(start).and_then(|at| all.get(at));
                        assert_eq!(byte, wanted.unwrap_or(&0xAA), "{cast:?} {first} {len} {at}");
                    }
                }
            }
        }
    }

    #[test]
    fn there_is_no_cast_to_the_same_type_nor_of_integers() {
        for &dtype in Dtype::ALL {
            assert_eq!(Cast::new(dtype, dtype), None);
            assert_eq!(Cast::new(Dtype::I32, dtype), None);
        }
    }

    #[test]
    #[should_panic(expected = "a cast of 4-byte to 2-byte elements from 8 to 6 bytes")]
    fn lengths_that_do_not_agree_are_refused() {
        let cast = Cast::new(Dtype::F32, Dtype::Bf16).expect("there is such a cast");
        cast.convert(&[0; 8], &mut [0; 6]);
    }

    #[test]
    #[should_panic(expected = "from 9 to 4 bytes")]
    fn half_an_element_is_refused() {
        let cast = Cast::new(Dtype::F32, Dtype::Bf16).expect("there is such a cast");
        cast.convert(&[0; 9], &mut [0; 4]);
    }
}
