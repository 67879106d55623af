//! Uses any names as the names in a folder. Parsing them must never fail. Their order must be
//! total, because a sort by an order that is not total may panic.

#![no_main]

use std::cmp::Ordering;

use libfuzzer_sys::fuzz_target;
use tensorfs::internal::format::names::{
    SUFFIX, is_dcp_shard, is_weights, natural_cmp, numbered, weight_map_output,
};

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let names: Vec<&str> = text.splitn(3, '\n').collect();
    for name in &names {
        if let Some(member) = numbered(name) {
            assert!(is_weights(name) && !is_dcp_shard(name), "{name:?}");
            assert!(member.output.ends_with(SUFFIX), "{member:?}");
            assert!(member.output.len() > SUFFIX.len(), "{member:?}");
        }
        if is_dcp_shard(name) {
            assert!(is_weights(name), "{name:?}");
        }
        if let Some(output) = weight_map_output(name) {
            assert!(output.ends_with(SUFFIX) && output.len() > SUFFIX.len(), "{output:?}");
        }
        assert_eq!(natural_cmp(name, name), Ordering::Equal, "{name:?}");
    }
    for a in &names {
        for b in &names {
            let order = natural_cmp(a, b);
            assert_eq!(order, natural_cmp(b, a).reverse(), "{a:?} {b:?}");
            assert_eq!(order == Ordering::Equal, a == b, "{a:?} {b:?}");
            for c in &names {
                if order != Ordering::Greater && natural_cmp(b, c) != Ordering::Greater {
                    assert_ne!(natural_cmp(a, c), Ordering::Greater, "{a:?} {b:?} {c:?}");
                }
            }
        }
    }
});
