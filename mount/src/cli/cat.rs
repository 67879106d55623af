//! `tensorfs cat`: the bytes of one tensor, raw or as `.npy`.

use tensorfs::Dtype;
use tensorfs::internal::catalog::{Catalog, Tensor};
use tensorfs::internal::consolidate::read_tensor;
use tensorfs::internal::error::{quoted, shown_path};
use tensorfs::internal::sweep::Sweep;

use super::args;
use super::output::{Failure, Outcome, RawOutput};
use super::sources::{begin_source_command, one_checkpoint};

/// The first bytes of a `.npy` file: the magic and the version.
const NPY_MAGIC: &[u8] = b"\x93NUMPY\x01\x00";

/// Number of bytes before the header text: the first bytes, and the length of the text.
const NPY_PREFIX_LEN: usize = NPY_MAGIC.len() + 2;

/// The data of a `.npy` file begins at a multiple of this number of bytes.
const NPY_ALIGN: usize = 64;

/// Maximum number of dimensions of a numpy array.
const NPY_DIMENSIONS_MAX: usize = 64;

/// If a name does not exist: the maximum number of similar names to suggest, and their minimum
/// similarity, from 0 to 1.
const SUGGESTED_MAX: usize = 3;
const NEAR_MIN: f64 = 0.7;

pub(super) fn run(args: &args::CatArgs) -> Outcome {
    if args.source.json {
        return Err(Failure::Usage("cat writes bytes, no JSON; leave --json out".to_owned()));
    }
    let mut output = RawOutput::open(args.force)?;
    let options = begin_source_command(&args.source, &args::CAT)?;
    let settings = options.settings();
    let (checkpoint, notes, _) = one_checkpoint(&args.source, options)?;
    for note in &notes {
        tracing::warn!("{}: {note}", shown_path(&args.source.source));
    }
    let catalog = checkpoint.catalog();
    let Some(tensor) = catalog.tensor(&args.tensor) else {
        let near = match suggested(catalog, &args.tensor) {
            near if near.is_empty() => "`tensorfs ls` lists all".to_owned(),
            near => format!("did you mean {}?", near.join(" or ")),
        };
        return Err(Failure::Failed(format!(
            "{}: has no tensor {}; {near}",
            shown_path(&checkpoint.path()),
            quoted(&args.tensor)
        )));
    };
    let header = if args.npy { npy_header(&tensor)? } else { Vec::new() };
    if !output.write(&header)? {
        return Ok(());
    }
    let mut failed = None;
    let read = read_tensor(&checkpoint, &Sweep::new(settings), tensor.position(), &mut |bytes| {
        match output.write(bytes) {
            Ok(true) => Ok(()),
            // The reader has closed the pipe.
            Ok(false) => Err(tensorfs::Error::cancelled("the reader has gone")),
            Err(failure) => {
                failed = Some(failure);
                Err(tensorfs::Error::cancelled("standard output cannot be written"))
            }
        }
    });
    match (read, failed) {
        (_, Some(failure)) => Err(failure),
        (Err(tensorfs::Error::Cancelled { .. }), None) => Ok(()),
        (outcome, None) => Ok(outcome?),
    }
}

/// Names in `catalog` that are similar to `name`, in quotes, the most similar first. Leading parts may
/// be missing in `name`, such as in `wte.weight` for `transformer.wte.weight`.
fn suggested(catalog: &Catalog, name: &str) -> Vec<String> {
    let dots = name.matches('.').count();
    let near_names = catalog.tensors().filter_map(|tensor| {
        let whole = strsim::normalized_damerau_levenshtein(name, tensor.name);
        let end = tensor.name.rmatch_indices('.').nth(dots).map_or(0.0, |(dot, _)| {
            strsim::normalized_damerau_levenshtein(name, &tensor.name[dot + 1..])
        });
        let near = whole.max(end);
        (near >= NEAR_MIN).then_some((near, tensor.name))
    });
    let mut rated: Vec<(f64, &str)> = near_names.collect();
    rated.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(b.1)));
    rated.iter().take(SUGGESTED_MAX).map(|(_, name)| quoted(name)).collect()
}

/// The header of a `.npy` file for this tensor. It has the same bytes that `numpy.save` writes.
fn npy_header(tensor: &Tensor<'_>) -> Result<Vec<u8>, Failure> {
    let refused = |why: String| Failure::Failed(format!("tensor {}: {why}", quoted(tensor.name)));
    let Some(descr) = npy_descr(tensor.dtype) else {
        let dtype = tensor.dtype;
        let cast = if dtype == Dtype::Bf16 { ", or cast it with -o dtype=f32" } else { "" };
        return Err(refused(format!(
            "numpy has no {dtype}; leave --npy out for the raw bytes{cast}"
        )));
    };
    if tensor.shape.len() > NPY_DIMENSIONS_MAX {
        return Err(refused(format!(
            "has {} dimensions, numpy has at most {NPY_DIMENSIONS_MAX}; leave --npy out",
            tensor.shape.len()
        )));
    }
    let sizes: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
    // In Python, a tuple with one element ends in a comma.
    let comma = if sizes.len() == 1 { "," } else { "" };
    let shape = sizes.join(", ");
    let mut text =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}{comma}), }}");
    // numpy leaves space for the first dimension to grow to 21 digits.
    let growth = tensor.shape.first().map_or(0, |size| 21 - size.to_string().len());
    text.push_str(&" ".repeat(growth));
    // If no padding is needed, numpy adds `NPY_ALIGN` spaces, and so does this code.
    let end = (NPY_PREFIX_LEN + text.len() + 2).next_multiple_of(NPY_ALIGN);
    text.push_str(&" ".repeat(end - NPY_PREFIX_LEN - text.len() - 1));
    text.push('\n');
    // The text fits into 16 bits: the shape has at most 64 numbers of 20 digits.
    let len = text.len() as u16;
    Ok([NPY_MAGIC, &len.to_le_bytes(), text.as_bytes()].concat())
}

/// The `descr` of numpy for a dtype. `None` if numpy has no such type.
fn npy_descr(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::Bool => "|b1",
        Dtype::U8 => "|u1",
        Dtype::I8 => "|i1",
        Dtype::I16 => "<i2",
        Dtype::U16 => "<u2",
        Dtype::F16 => "<f2",
        Dtype::I32 => "<i4",
        Dtype::U32 => "<u4",
        Dtype::F32 => "<f4",
        Dtype::C64 => "<c8",
        Dtype::F64 => "<f8",
        Dtype::I64 => "<i8",
        Dtype::U64 => "<u8",
        _ => return None,
    })
}
