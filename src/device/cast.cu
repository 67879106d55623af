// Casts of elements on a GPU: what `src/cast.rs` does, to the bit and by the same names.
//
// `make_ptx.py` makes `cast.ptx` of this file; commit both. The code is C as well as CUDA C++, so
// `tests/casts.rs` compiles it for the host and compares every kernel with the cast in Rust.
//
// All kernels have one signature, NAME(from, to, elements), and work with any number of blocks
// and threads along x. `from` may be any address: a checkpoint promises no alignment. `to` is
// aligned to its elements. The two do not overlap.
//
// Bits and not floats, since hardware makes other NaNs than torch does on a CPU.

// Whoever compiles this for another machine has said what these are there.
#ifndef FUNCTION
#define FUNCTION static __device__ __forceinline__
#define ENTRY extern "C" __global__
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SIGN 0x80000000u
#define ABS 0x7FFFFFFFu
#define INFINITY_BITS 0x7F800000u
#define QUIET 0x00400000u
#define SIGNALLING 0x7F800001u

FUNCTION u32 f64_to_f32(u64 bits)
{
    u32 rounded = __float_as_uint((float)__longlong_as_double((long long)bits));
    u32 nan = ((u32)(bits >> 32) & SIGN) | INFINITY_BITS | QUIET | ((u32)(bits >> 29) & 0x007FFFFFu);
    return bits << 1 > 0xFFE0000000000000ull ? nan : rounded;
}

FUNCTION u32 bf16_to_f32(u16 bits)
{
    return (u32)bits << 16;
}

FUNCTION u16 f32_to_bf16(u32 bits, u16 nan)
{
    u32 half = 0x7FFFu + ((bits >> 16) & 1u);
    return (bits & ABS) > INFINITY_BITS ? nan : (u16)((bits + half) >> 16);
}

FUNCTION u16 f32_to_f16(u32 bits)
{
    u32 abs = bits & ABS;
    // Below 2^-14 the last place of the result is 2^-24, and so is that of 0.5: the sum rounds.
    u32 tiny = __float_as_uint(__uint_as_float(abs) + 0.5f) - 0x3F000000u;
    u32 normal = (abs - (112u << 23) + 0xFFFu + ((abs >> 13) & 1u)) >> 13;
    u32 finite = abs < 0x38800000u ? tiny : normal;
    u32 nan = 0x7E00u | ((abs >> 13) & 0x3FFu);
    u32 special = abs > INFINITY_BITS ? nan : 0x7C00u;
    u32 magnitude = abs >= 0x47800000u ? special : finite;
    return (u16)(((bits >> 16) & 0x8000u) | magnitude);
}

FUNCTION u32 f16_to_f32(u16 bits)
{
    u32 sign = ((u32)bits & 0x8000u) << 16;
    u32 abs = ((u32)bits & 0x7FFFu) << 13;
    // A subnormal is the fraction of 2^-14 without its leading one: with it, and then without.
    u32 tiny = __float_as_uint(__uint_as_float(abs | 0x38800000u) - __uint_as_float(0x38800000u));
    u32 special = abs >= 0x0F800000u ? 112u << 23 : 0u;
    u32 quiet = abs > 0x0F800000u ? QUIET : 0u;
    u32 large = (abs + (112u << 23) + special) | quiet;
    return sign | (abs < 0x00800000u ? tiny : large);
}

FUNCTION u32 sign(u8 byte)
{
    return ((u32)byte & 0x80u) << 24;
}

// An 8-bit float of sign, exponent and `width` bits of fraction, as `f16_to_f32` does it.
FUNCTION u32 finite(u8 byte, u32 width, u32 bias)
{
    u32 abs = ((u32)byte & 0x7Fu) << (23 - width);
    u32 least = (128 - bias) << 23;
    u32 tiny = __float_as_uint(__uint_as_float(abs | least) - __uint_as_float(least));
    u32 normal = abs + ((127 - bias) << 23);
    return sign(byte) | (abs < 0x00800000u ? tiny : normal);
}

FUNCTION u32 e4m3(u8 byte)
{
    return (byte & 0x7F) == 0x7F ? sign(byte) | 0x7FF00000u : finite(byte, 3, 7);
}

FUNCTION u32 e5m2(u8 byte)
{
    u32 fraction = (u32)byte & 3u;
    u32 quiet = fraction ? QUIET : 0u;
    u32 special = sign(byte) | INFINITY_BITS | quiet | fraction << 21;
    return (byte & 0x7C) == 0x7C ? special : finite(byte, 2, 15);
}

FUNCTION u32 e4m3fnuz(u8 byte)
{
    return byte == 0x80 ? SIGNALLING : finite(byte, 3, 8);
}

FUNCTION u32 e5m2fnuz(u8 byte)
{
    return byte == 0x80 ? SIGNALLING : finite(byte, 2, 16);
}

FUNCTION u32 e8m0(u8 byte)
{
    u32 power = byte == 0 ? 0x00400000u : (u32)byte << 23;
    return byte == 0xFF ? SIGNALLING : power;
}

// Element `at` of little-endian elements, byte by byte where they are not aligned.
#define LOAD(Type)                                                                    \
    FUNCTION Type load_##Type(const u8 *from, u64 at)                                 \
    {                                                                                 \
        Type bits = 0;                                                                \
        u32 byte;                                                                     \
        if ((u64)from % sizeof(Type) == 0) {                                          \
            return ((const Type *)from)[at];                                          \
        }                                                                             \
        for (byte = 0; byte < sizeof(Type); byte++) {                                 \
            bits |= (Type)((Type)from[at * sizeof(Type) + byte] << (8 * byte));       \
        }                                                                             \
        return bits;                                                                  \
    }

LOAD(u8)
LOAD(u16)
LOAD(u32)
LOAD(u64)

#define KERNEL(name, From, To, cast)                                                  \
    ENTRY void name(const void *__restrict__ from, void *__restrict__ to, u64 elements) \
    {                                                                                 \
        u64 step = (u64)gridDim.x * blockDim.x;                                       \
        u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;                          \
        for (; at < elements; at += step) {                                           \
            From x = load_##From((const u8 *)from, at);                               \
            ((To *)to)[at] = cast;                                                    \
        }                                                                             \
    }

KERNEL(cast_f64_f32, u64, u32, f64_to_f32(x))
KERNEL(cast_f64_f16, u64, u16, f32_to_f16(f64_to_f32(x)))
KERNEL(cast_f64_bf16, u64, u16, f32_to_bf16(f64_to_f32(x), 0xFFFF))
KERNEL(cast_f32_f16, u32, u16, f32_to_f16(x))
KERNEL(cast_f32_bf16, u32, u16, f32_to_bf16(x, 0xFFFF))
KERNEL(cast_f16_f32, u16, u32, f16_to_f32(x))
KERNEL(cast_f16_bf16, u16, u16, f32_to_bf16(f16_to_f32(x), 0x7FC0))
KERNEL(cast_bf16_f32, u16, u32, bf16_to_f32(x))
KERNEL(cast_bf16_f16, u16, u16, f32_to_f16(bf16_to_f32(x)))

#define KERNELS_8(name, decode)                                                       \
    KERNEL(cast_##name##_f32, u8, u32, decode(x))                                     \
    KERNEL(cast_##name##_f16, u8, u16, f32_to_f16(decode(x)))                         \
    KERNEL(cast_##name##_bf16, u8, u16, f32_to_bf16(decode(x), 0x7FC0))

KERNELS_8(f8_e4m3, e4m3)
KERNELS_8(f8_e5m2, e5m2)
KERNELS_8(f8_e4m3fnuz, e4m3fnuz)
KERNELS_8(f8_e5m2fnuz, e5m2fnuz)
KERNELS_8(f8_e8m0, e8m0)
