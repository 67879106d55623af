//! Element types. One table lists their names in headers, their names in torch and their widths.

use serde::{Deserialize, Deserializer, de};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $bits:literal $torch:expr,)*) => {
        /// An element type of safetensors 0.8. The values are in the order of the reference implementation.
        ///
        /// ```
        /// use tensorfs::Dtype;
        ///
        /// assert_eq!(Dtype::from_name("BF16"), Some(Dtype::Bf16));
        /// assert_eq!(Dtype::Bf16.bits_of(&[4, 36]), Some(4 * 36 * 16));
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Dtype { $($(#[$doc])* $variant,)* }

        impl Dtype {
            /// All element types, in the order of the reference implementation: sorted by width, except that
            /// `Bool` comes first.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant,)*];

            /// Name in a header, for example `BF16`.
            pub fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)* }
            }

            /// Width of one element in bits.
            #[inline]
            pub fn bits(self) -> u64 {
                match self { $(Dtype::$variant => $bits,)* }
            }

            /// Name in torch, for example `bfloat16`. `None` if torch does not have the type.
            pub(crate) fn torch_name(self) -> Option<&'static str> {
                match self { $(Dtype::$variant => $torch,)* }
            }
        }
    };
}

dtypes! {
    /// Boolean, one byte.
    Bool "BOOL" 8 Some("bool"),
    /// 4-bit float, E2M1.
    F4 "F4" 4 Some("float4_e2m1fn_x2"),
    /// 6-bit float, E2M3.
    F6E2M3 "F6_E2M3" 6 None,
    /// 6-bit float, E3M2.
    F6E3M2 "F6_E3M2" 6 None,
    /// Unsigned 8-bit integer.
    U8 "U8" 8 Some("uint8"),
    /// Signed 8-bit integer.
    I8 "I8" 8 Some("int8"),
    /// 8-bit float, E5M2.
    F8E5M2 "F8_E5M2" 8 Some("float8_e5m2"),
    /// 8-bit float, E4M3.
    F8E4M3 "F8_E4M3" 8 Some("float8_e4m3fn"),
    /// 8-bit exponent-only float.
    F8E8M0 "F8_E8M0" 8 Some("float8_e8m0fnu"),
    /// 8-bit float, E4M3, finite, unsigned zero.
    F8E4M3Fnuz "F8_E4M3FNUZ" 8 Some("float8_e4m3fnuz"),
    /// 8-bit float, E5M2, finite, unsigned zero.
    F8E5M2Fnuz "F8_E5M2FNUZ" 8 Some("float8_e5m2fnuz"),
    /// Signed 16-bit integer.
    I16 "I16" 16 Some("int16"),
    /// Unsigned 16-bit integer.
    U16 "U16" 16 Some("uint16"),
    /// Half precision float.
    F16 "F16" 16 Some("float16"),
    /// Brain float.
    Bf16 "BF16" 16 Some("bfloat16"),
    /// Signed 32-bit integer.
    I32 "I32" 32 Some("int32"),
    /// Unsigned 32-bit integer.
    U32 "U32" 32 Some("uint32"),
    /// Single precision float.
    F32 "F32" 32 Some("float32"),
    /// Complex of two single precision floats.
    C64 "C64" 64 Some("complex64"),
    /// Double precision float.
    F64 "F64" 64 Some("float64"),
    /// Signed 64-bit integer.
    I64 "I64" 64 Some("int64"),
    /// Unsigned 64-bit integer.
    U64 "U64" 64 Some("uint64"),
}

impl Dtype {
    /// The type whose name in headers is exactly `name`.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Dtype::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// The type whose name in torch is `name`.
    pub(crate) fn from_torch(name: &str) -> Option<Dtype> {
        Dtype::ALL.iter().copied().find(|dtype| dtype.torch_name() == Some(name))
    }

    /// Number of bits of a tensor of this shape. `None` if the number, or a product on the way to it, is 2^64 or more.
    /// The dimensions are multiplied from left to right, like in the reference implementation.
    pub fn bits_of(self, shape: &[u64]) -> Option<u64> {
        let mut bits = 1u64;
        for &dim in shape {
            bits = bits.checked_mul(dim)?;
        }
        bits.checked_mul(self.bits())
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The facts that a shard records of a tensor besides its name, its shape and its place. All pieces of a tensor have
/// the same facts, and views keep them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorFacts {
    /// Element type.
    pub dtype: Dtype,
}

impl From<Dtype> for TensorFacts {
    fn from(dtype: Dtype) -> TensorFacts {
        TensorFacts { dtype }
    }
}

impl std::fmt::Display for TensorFacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.dtype.fmt(f)
    }
}

/// Start of the message by which a parser recognizes an unknown dtype among JSON errors.
pub(crate) const UNKNOWN_DTYPE: &str = "unknown dtype ";

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        Dtype::from_name(&name).ok_or_else(|| {
            de::Error::custom(format_args!("{UNKNOWN_DTYPE}{}", crate::error::quoted(&name)))
        })
    }
}
