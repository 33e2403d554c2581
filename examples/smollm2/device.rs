//! Where the draft head runs and tokens are chosen: on the CPU beside the target, or on a GPU.

use eagle_verify::backend::cpu::{Cpu, Embedding};
use eagle_verify::{Backend, Result};

/// A backend, and how the target's numbers, which are on the CPU, get to it.
pub trait Device: Backend + Send {
    type Floats<'a>;

    fn bring<'a>(&self, numbers: &'a [f32]) -> Result<Self::Floats<'a>>;

    fn view<'a>(floats: &'a Self::Floats<'_>) -> Self::View<'a>;

    fn embedding(&self, table: &Embedding) -> Result<Self::Embedding>;
}

impl Device for Cpu {
    type Floats<'a> = &'a [f32];

    fn bring<'a>(&self, numbers: &'a [f32]) -> Result<&'a [f32]> {
        Ok(numbers)
    }

    fn view<'a>(floats: &'a &[f32]) -> &'a [f32] {
        floats
    }

    fn embedding(&self, table: &Embedding) -> Result<Embedding> {
        Ok(table.clone())
    }
}

#[cfg(feature = "cuda")]
mod on_gpu {
    use eagle_verify::TokenId;
    use eagle_verify::backend::cuda::{self, Buffer, Cuda, View};

    use super::*;

    /// A target on the same GPU would hand over its own memory (`DeviceSlice::from_raw`); this one has to copy.
    impl Device for Cuda {
        type Floats<'a> = Buffer<f32>;

        fn bring(&self, numbers: &[f32]) -> Result<Buffer<f32>> {
            self.upload(numbers)
        }

        fn view<'a>(floats: &'a Buffer<f32>) -> View<'a> {
            floats.into()
        }

        fn embedding(&self, table: &Embedding) -> Result<cuda::Embedding> {
            let mut rows = vec![0.0; table.vocab() * table.hidden()];
            for (token, row) in (0..).map(TokenId).zip(rows.chunks_exact_mut(table.hidden())) {
                table.copy_row(token, row)?;
            }
            cuda::Embedding::new(self.upload(&rows)?, table.hidden())
        }
    }
}
