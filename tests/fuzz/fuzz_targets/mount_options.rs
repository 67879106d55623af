//! Parses any text as mount options. Accepted values must be in range, an escaped value must be
//! read back unchanged, and lenient parsing must not refuse text that strict parsing accepts.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorfs_mount::Options;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let strict = Options::parse(&[text], false);
    let sloppy = Options::parse(&[text], true);
    match (&strict, &sloppy) {
        (Ok(strict), Ok(sloppy)) => assert_eq!(strict, sloppy),
        (Ok(_), Err(refusal)) => panic!("sloppy alone refuses: {refusal}"),
        (Err(refusal), _) => assert!(!refusal.is_empty()),
    }
    if let Ok(options) = &strict {
        assert!(options.umask <= 0o777, "{options:?}");
        assert_ne!(options.open.expect_shards, Some(0));
        assert_ne!(options.fsname.as_deref(), Some(""));
    }

    if !text.is_empty() {
        let escaped = text.replace('\\', r"\\").replace(',', r"\,");
        let one = format!("fsname={escaped}");
        let options = Options::parse(&[one.as_str(), "ro"], false).expect("any name will do");
        assert_eq!(options.fsname.as_deref(), Some(text));
        // Options twice within one string.
        let joined = Options::parse(&[format!("{one},ro")], false).expect("any name will do");
        assert_eq!(joined, options);
    }
});
