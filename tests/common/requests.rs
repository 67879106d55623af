//! Random requests for random checkpoints, and their expected results.

use std::ops::Range;

use proptest::prelude::*;
use tensorfs::Dtype;
use tensorfs::internal::cast::Cast;
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::plan::{PlanLimits, TensorRequest};

use super::{Box_, Cut, bytes};

/// Random limits of plans, in whole pages. They are small, so that small tensors take several reads.
pub(crate) fn limits() -> impl Strategy<Value = PlanLimits> {
    let sizes = (1u64..4, 0u64..200, 0u64..2000, 1u64..20_000);
    (sizes, any::<bool>(), 0u32..9).prop_map(|((pages, gap, own, slab), in_place, align)| {
        PlanLimits {
            chunk: 4096 * pages,
            moved: 4096 * (pages % 3 + 1),
            gap,
            dedicated_min_bytes: own,
            place: own,
            unaligned: 4096 * ((pages + 1) % 3 + 1),
            slab,
            in_place,
            align: 1 << align,
        }
    })
}

/// A part of a tensor: two numbers choose the indices in each dimension. Dimensions without numbers are whole.
fn part(shape: &[u64], choices: &[(u16, u16)]) -> Option<Vec<Range<u64>>> {
    let ranges = shape.iter().zip(choices).map(|(&size, &(a, b))| {
        // The last dimension is cut at multiples of 4, which are whole bytes for every dtype.
        let step = if size.is_multiple_of(4) { 4 } else { 1 };
        let (a, b) = (u64::from(a) % (size / step + 1), u64::from(b) % (size / step + 1));
        a.min(b) * step..a.max(b) * step
    });
    (choices.len() >= shape.len()).then(|| ranges.collect())
}

/// A random request. Its numbers can be applied to any checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct RandomRequest {
    tensor: usize,
    part: Vec<(u16, u16)>,
    /// The number of another dtype to cast to, if there is such a dtype.
    cast: Option<usize>,
    /// The offset in a page at which the memory of the caller begins. A number beyond a page stands for the same offset
    /// as in the file.
    at: Option<u64>,
}

pub(crate) fn requests() -> impl Strategy<Value = Vec<RandomRequest>> {
    let part = prop::collection::vec((any::<u16>(), any::<u16>()), 0..6);
    let (cast, at) = (prop::option::of(0usize..3), prop::option::of(0u64..8192));
    let request = (0usize..3, part, cast, at).prop_map(|(tensor, part, cast, at)| RandomRequest {
        tensor,
        part,
        cast,
        at,
    });
    prop::collection::vec(request, 0..6)
}

pub(crate) fn tensor_requests(
    checkpoint: &Checkpoint,
    tensors: &[Cut],
    requests: &[RandomRequest],
) -> Vec<TensorRequest> {
    // The catalog sorts the tensors by name, which is also the order here.
    let tensor_request = |request: &RandomRequest| {
        let cut = &tensors[request.tensor];
        let cast = request.cast.map(|number| [Dtype::F32, Dtype::F16, Dtype::Bf16][number]);
        let tensor = checkpoint.catalog().tensor_at(request.tensor);
        let agreeing = tensor.first_piece().range.start % 4096;
        TensorRequest {
            tensor: request.tensor,
            part: part(&cut.shape, &request.part),
            cast: cast.filter(|&to| Cast::new(cut.dtype, to).is_some()),
            destination: request.at.map(|at| if at < 4096 { at } else { agreeing }),
        }
    };
    requests.iter().map(tensor_request).collect()
}

pub(crate) fn expected(tensor: &Cut, tensor_request: &TensorRequest) -> Vec<u8> {
    let bytes = match &tensor_request.part {
        None => bytes(&tensor.name, tensor.dtype, &tensor.shape),
        Some(part) => tensor.piece(&Box_ {
            offset: part.iter().map(|range| range.start).collect(),
            shape: part.iter().map(|range| range.end - range.start).collect(),
        }),
    };
    match tensor_request.cast.and_then(|to| Cast::new(tensor.dtype, to)) {
        None => bytes,
        Some(cast) => {
            let mut after = vec![0; cast.len_after(bytes.len() as u64) as usize];
            cast.convert(&bytes, &mut after);
            after
        }
    }
}
