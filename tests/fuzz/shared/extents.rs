//! Checks that the tensors of a description lie within their file.

use tensorfs::internal::format::ShardDescription;

pub(super) fn check_extents(file: &[u8], description: &ShardDescription) {
    let mut strided = description.strided.iter().peekable();
    for (number, tensor) in description.tensors().enumerate() {
        let strides = strided.next_if(|(strided, _)| *strided as usize == number);
        let bits = match strides {
            Some((_, strides)) => bits_spanned(tensor.shape, strides, tensor.facts.dtype.bits()),
            None => tensor.facts.dtype.bits_of(tensor.shape).expect("it was checked"),
        };
        let end = tensor.start.checked_add(bits / 8).expect("it was checked");
        assert!(end <= file.len() as u64, "{} ends at {end} of {}", tensor.name, file.len());
    }
    assert!(strided.next().is_none(), "strides of no tensor");
}

/// The number of bits from the first element to the end of the last one.
fn bits_spanned(shape: &[u64], strides: &[u64], bits: u64) -> u64 {
    assert_eq!(shape.len(), strides.len());
    if shape.contains(&0) {
        return 0;
    }
    let last: u64 = shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
    (last + 1) * bits
}
