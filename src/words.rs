//! Types whose values are words of options and of JSON. One table for each type provides `Display`, `FromStr`
//! and the list of words for errors.

use std::fmt;

/// The error for a word that is not a value of the type. It shows the known words.
///
/// ```
/// use tensorfs::Prefer;
///
/// let error = "neither".parse::<Prefer>().unwrap_err();
/// assert_eq!(error.to_string(), "file or shards");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownWord(pub &'static [&'static str]);

impl fmt::Display for UnknownWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [first @ .., before, last] => {
                first.iter().try_for_each(|word| write!(f, "{word}, "))?;
                write!(f, "{before} or {last}")
            }
            words => f.write_str(&words.concat()),
        }
    }
}

impl std::error::Error for UnknownWord {}

/// Declares a fieldless enum with a word for each value: `words! { enum Size { Small = "small", Large = "large" } }`.
#[doc(hidden)]
#[macro_export]
macro_rules! words {
    ($(#[$attribute:meta])* $visible:vis enum $type:ident {
        $($(#[$of_variant:meta])* $variant:ident = $word:literal),+ $(,)?
    }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $visible enum $type {
            $($(#[$of_variant])* $variant,)+
        }

        impl $type {
            /// All values.
            #[allow(dead_code, unreachable_pub, reason = "the type may be private")]
            pub const ALL: &[$type] = &[$($type::$variant),+];

            /// The words of all values.
            #[allow(dead_code, unreachable_pub, reason = "the type may be private")]
            pub const WORDS: $crate::UnknownWord = $crate::UnknownWord(&[$($word),+]);

            /// The word for this value.
            #[allow(unreachable_pub, reason = "the type may be private")]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $($type::$variant => $word,)+
                }
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl ::serde::Serialize for $type {
            fn serialize<S: ::serde::Serializer>(
                &self,
                serializer: S,
            ) -> ::std::result::Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl ::std::str::FromStr for $type {
            type Err = $crate::UnknownWord;

            fn from_str(word: &str) -> ::std::result::Result<$type, Self::Err> {
                let known = $type::ALL.iter().find(|known| known.as_str() == word);
                known.copied().ok_or($type::WORDS)
            }
        }
    };
}

#[cfg(test)]
mod tests {
    words! {
        enum Size {
            Small = "small",
            Middle = "middle",
            Large = "large",
        }
    }

    #[test]
    fn words_are_read_and_written() {
        for (size, word) in
            [(Size::Small, "small"), (Size::Middle, "middle"), (Size::Large, "large")]
        {
            assert_eq!(size.to_string(), word);
            assert_eq!(word.parse(), Ok(size));
        }
        let unknown = "huge".parse::<Size>().unwrap_err();
        assert_eq!(unknown.to_string(), "small, middle or large");
    }
}
