//! Sizes in bytes as text: in the form of options, and in a form for people.

/// The units that options accept, in lower case, with their number of bytes. `GB` is decimal, as on the hub.
const UNITS: [(&str, u64); 14] = [
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

/// Parses a whole number with or without a unit, and returns the number of bytes. `64M` and `64MiB` are 64
/// times 2^20, and `64MB` is 64 times 10^6.
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.to_ascii_lowercase();
    let (_, bytes) = UNITS.iter().find(|(known, _)| *known == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*bytes)
}

/// `bytes` as text for people, in the largest binary unit that is not larger than `bytes`: `128 MiB`, `44.93 MiB`.
pub fn shown_size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes >> shift > 0) {
        None => format!("{bytes} B"),
        Some((shift, unit)) if bytes.trailing_zeros() >= *shift => {
            format!("{} {unit}", bytes >> shift)
        }
        Some((shift, unit)) => format!("{:.2} {unit}", bytes as f64 / (1_u64 << shift) as f64),
    }
}

/// `bytes` as short text for people: `128M`, `44.93M`.
pub fn short_size(bytes: u64) -> String {
    let shown = shown_size(bytes);
    shown.trim_end_matches(['i', 'B']).replace(' ', "")
}

/// `bytes` in the form of options, in the largest unit in which the number is whole: `128M`.
pub fn option_size(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let exact = units.iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    exact.map_or(bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_number_with_or_without_a_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("17", 17),
            ("7B", 7),
            ("4k", 4096),
            ("4KiB", 4096),
            ("2T", 2 << 40),
            ("5GB", 5_000_000_000),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in ["", "M", "-1", "+1", "1.5G", "4 K", "1P", "4ib", "99999999T", "0x10"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn a_size_is_shown_in_its_largest_unit_and_given_back_in_one_that_is_exact() {
        for (bytes, shown, short, option) in [
            (0, "0 B", "0", "0"),
            (1023, "1023 B", "1023", "1023"),
            (1 << 17, "128 KiB", "128K", "128K"),
            (6 << 30, "6 GiB", "6G", "6G"),
            (1536 << 20, "1.50 GiB", "1.50G", "1536M"),
            (5_000_000_000, "4.66 GiB", "4.66G", "5000000000"),
        ] {
            assert_eq!((shown_size(bytes).as_str(), short_size(bytes).as_str()), (shown, short));
            assert_eq!(option_size(bytes), option);
            assert_eq!(parse_size(option), Some(bytes));
        }
    }
}
