//! Whole tensors in memory, which are cut and joined element by element.

use std::ops::Range;

use tensorfs::Dtype;
use tensorfs::internal::cast::Cast;

use super::{Cut, bytes};

/// A tensor as a list of its elements, in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dense {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    elements: Vec<u64>,
}

impl Dense {
    pub(crate) fn of(tensor: &Cut) -> Dense {
        Dense::new(tensor.dtype, &tensor.shape, &bytes(&tensor.name, tensor.dtype, &tensor.shape))
    }

    fn new(dtype: Dtype, shape: &[u64], bytes: &[u8]) -> Dense {
        let bit = |at: u64| u64::from(bytes[(at / 8) as usize] >> (at % 8) & 1);
        let bits = dtype.bits();
        let element = |first: u64| (0..bits).fold(0, |sum, at| sum | bit(first + at) << at);
        let count: u64 = shape.iter().product();
        let elements = (0..count).map(|number| element(number * bits)).collect();
        Dense { dtype, shape: shape.to_vec(), elements }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let bits = self.dtype.bits();
        let mut bytes = vec![0; (self.elements.len() as u64 * bits / 8) as usize];
        for (number, element) in self.elements.iter().enumerate() {
            for at in 0..bits {
                let bit = number as u64 * bits + at;
                bytes[(bit / 8) as usize] |= ((element >> at & 1) as u8) << (bit % 8);
            }
        }
        bytes
    }

    /// The part with the indices `range` of dimension `dim`.
    pub(crate) fn part(&self, dim: usize, range: Range<u64>) -> Dense {
        let mut shape = self.shape.clone();
        shape[dim] = range.end - range.start;
        let inner: u64 = shape[dim + 1..].iter().product();
        let is_inside = |number: &u64| range.contains(&(number / inner.max(1) % self.shape[dim]));
        let numbers = (0..self.elements.len() as u64).filter(is_inside);
        let elements = numbers.map(|number| self.elements[number as usize]).collect();
        Dense { dtype: self.dtype, shape, elements }
    }

    /// The part with these indices in each dimension.
    pub(crate) fn box_of(&self, part: &[Range<u64>]) -> Dense {
        let cut =
            |tensor: Dense, (dim, range): (usize, &Range<u64>)| tensor.part(dim, range.clone());
        part.iter().enumerate().fold(self.clone(), cut)
    }

    /// Joins the tensors one after the other along `dim`.
    pub(crate) fn join(tensors: &[Dense], dim: usize) -> Dense {
        let first = &tensors[0];
        let mut shape = first.shape.clone();
        shape[dim] = tensors.iter().map(|tensor| tensor.shape[dim]).sum();
        let outer: u64 = shape[..dim].iter().product();
        let rows = |tensor: &Dense, at: u64| {
            let len: u64 = tensor.shape[dim..].iter().product();
            tensor.elements[(at * len) as usize..((at + 1) * len) as usize].to_vec()
        };
        let elements = (0..outer).flat_map(|at| tensors.iter().flat_map(move |t| rows(t, at)));
        Dense { dtype: first.dtype, elements: elements.collect(), shape }
    }

    /// The tensor, cast to another dtype.
    pub(crate) fn cast(&self, to: Dtype) -> Dense {
        let Some(cast) = Cast::new(self.dtype, to) else { return self.clone() };
        let bytes = self.bytes();
        let mut after = vec![0; cast.len_after(bytes.len() as u64) as usize];
        cast.convert(&bytes, &mut after);
        Dense::new(to, &self.shape, &after)
    }
}
