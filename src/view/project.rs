//! The tensors of a view, as a catalog made from another catalog.

use super::View;
use super::parallel::{RankTensors, ReadConfig};
use super::select::select;
use crate::catalog::{Catalog, Projected, ProjectedFrom};
use crate::error::{ErrorKind, Fault};

impl View {
    /// Whether the view has the tensors of the source, unchanged and under their names.
    pub fn keeps_tensors(&self) -> bool {
        let View { files: _, format: _, map: _, include, exclude, shard, rename, dtype, keep: _ } =
            self;
        let keeps_names = include.is_empty() && exclude.is_empty() && rename.is_none();
        keeps_names && shard.is_none() && dtype.is_none()
    }

    /// The catalog of the view. The steps are: select tensors, take the slices of a rank, split, join or rename
    /// tensors, and cast them. Each step uses the names that result from the step before. `read_config` is
    /// called if a rule needs `config.json`.
    ///
    /// # Errors
    /// `view` if a rule does not fit the catalog. `overflow` if the tensors of the view have 2^63 bytes or
    /// more. Also the errors of `Catalog::project`.
    pub(crate) fn project(
        &self,
        catalog: &Catalog,
        read_config: ReadConfig<'_>,
    ) -> Result<Catalog, Fault> {
        let catalog = self.project_unchecked(catalog, read_config)?;
        // With this limit, sums of tensor lengths in a file or in a load cannot overflow.
        if i64::try_from(catalog.data_len()).is_err() {
            return Err(ErrorKind::Overflow.fault(format!(
                "the tensors have {} bytes or more in all, tensorfs takes checkpoints and views of \
                 less than 2^63; check the shapes in the headers",
                catalog.data_len()
            )));
        }
        Ok(catalog)
    }

    fn project_unchecked(
        &self,
        catalog: &Catalog,
        read_config: ReadConfig<'_>,
    ) -> Result<Catalog, Fault> {
        if self.keeps_tensors() {
            return Ok(catalog.clone());
        }
        let selected = select(catalog, &self.include, &self.exclude)?;
        let named = match (&self.shard, &self.rename) {
            (Some(shard), rename) => {
                let RankTensors { catalog, cuts } =
                    shard.project(catalog, &selected, read_config)?;
                match rename {
                    Some(rules) => rules.project(&catalog, &all_of(&catalog), &cuts)?,
                    None => catalog,
                }
            }
            (None, Some(rules)) => rules.project(catalog, &selected, &[])?,
            (None, None) => catalog.project(selected.iter().map(|&position| {
                let tensor = catalog.tensor_at(position as usize);
                let from = ProjectedFrom::Whole(position);
                Projected { name: tensor.name, from, dtype: tensor.dtype }
            }))?,
        };
        let Some(cast) = &self.dtype else { return Ok(named) };
        let positions = all_of(&named);
        let dtypes = cast.dtypes(&named, &positions, &self.keep)?;
        let tensors = positions.iter().zip(&dtypes).map(|(&position, &dtype)| Projected {
            name: named.tensor_at(position as usize).name,
            from: ProjectedFrom::Whole(position),
            dtype,
        });
        named.project(tensors)
    }
}

/// The positions of all tensors.
fn all_of(catalog: &Catalog) -> Vec<u32> {
    (0..catalog.len() as u32).collect()
}
