//! Linear layers for few rows: the weights stream from memory once, whatever the number of rows.

use super::Cpu;
use super::simd::{self, BLOCK_BYTES, PANEL, Weight};
use super::threads::MAX_ROWS;
use crate::error::{Error, Result, expect_len};

/// A linear layer `y = x W^T` without bias, made for 1 to 64 rows.
///
/// A verify pass multiplies few rows with large weights, so its time is that of reading the weights, and
/// extra rows are nearly free if the arithmetic fits in the shadow of that stream. The weights are packed
/// once, in the order in which they are used; one pass over them serves all rows.
///
/// # Rounding
///
/// f32 throughout: `y[r][o] = fma(x[r][k], w[o][k], y[r][o])` for `k` ascending, starting from 0. So a row's
/// bits don't depend on which rows come with it, on the number of threads, or on the instruction set (on
/// machines with fused multiply-add). bf16 weights are widened exactly.
///
/// ```
/// use eagle_verify::backend::cpu::{Cpu, PackedLinear};
///
/// let cpu = Cpu::new()?;
/// let layer = PackedLinear::new(&[1.0f32, 2.0, 3.0, 4.0], 2, 2)?; // [outputs, inputs]
/// let mut y = [0.0; 4];
/// layer.forward(&cpu, &[1.0, 0.0, 0.0, 1.0], &mut y)?; // two rows
/// assert_eq!(y, [1.0, 3.0, 2.0, 4.0]);
/// # Ok::<(), eagle_verify::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PackedLinear {
    num_inputs: usize,
    num_outputs: usize,
    panels: Panels,
}

/// Panels of 32 outputs, each `[inputs, 32]`; the outputs that fill up the last panel are zero.
#[derive(Clone, Debug)]
enum Panels {
    F32(Pages),
    Bf16(Pages),
}

/// Bytes that start on a page, so that the prefetch's pages are the machine's.
#[derive(Clone, Debug)]
struct Pages(Vec<Page>);

#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl PackedLinear {
    /// Packs `weights`, `[num_outputs, num_inputs]` row-major, of f32 or bf16.
    ///
    /// # Errors
    /// *Misuse* when a dimension is 0 or the length is not their product.
    pub fn new<W: Weight>(weights: &[W], num_outputs: usize, num_inputs: usize) -> Result<Self> {
        Self::stack(&[weights], num_inputs).and_then(|packed| {
            expect_len("outputs of a linear layer", num_outputs, packed.num_outputs)?;
            Ok(packed)
        })
    }

    /// Packs several layers over the same input as one, their outputs one after the other: query, key and
    /// value projections, or the gate and up projections of an MLP.
    ///
    /// # Errors
    /// *Misuse* when `num_inputs` is 0, a part is not whole rows of it, or there are no outputs.
    pub fn stack<W: Weight>(parts: &[&[W]], num_inputs: usize) -> Result<Self> {
        let wanted = "a positive multiple of the number of inputs";
        for part in parts {
            if num_inputs == 0 || part.is_empty() || part.len() % num_inputs != 0 {
                return Err(Error::misuse("weights of a linear layer", wanted, part.len()));
            }
        }
        let rows: Vec<&[W]> = parts.iter().flat_map(|part| part.chunks_exact(num_inputs)).collect();
        if rows.is_empty() {
            return Err(Error::misuse("weights of a linear layer", wanted, 0));
        }
        let panel_bytes = num_inputs * PANEL * size_of::<W>();
        let num_bytes = rows.len().div_ceil(PANEL) * panel_bytes;
        let page = Page([0; 4096]);
        let mut pages = Pages(vec![page; num_bytes.div_ceil(4096)]);
        let packed: &mut [W] = bytemuck::cast_slice_mut(&mut pages.0);
        for (panel, rows) in packed.chunks_mut(num_inputs * PANEL).zip(rows.chunks(PANEL)) {
            for (lane, row) in rows.iter().enumerate() {
                for (step, &weight) in panel.chunks_exact_mut(PANEL).zip(*row) {
                    step[lane] = weight;
                }
            }
        }
        let panels = match size_of::<W>() {
            4 => Panels::F32(pages),
            _ => Panels::Bf16(pages),
        };
        Ok(Self { num_inputs, num_outputs: rows.len(), panels })
    }

    /// Length of an input row.
    pub fn num_inputs(&self) -> usize {
        self.num_inputs
    }

    /// Length of an output row.
    pub fn num_outputs(&self) -> usize {
        self.num_outputs
    }

    /// Bytes of weights that one pass reads.
    pub fn num_bytes(&self) -> usize {
        let (Panels::F32(pages) | Panels::Bf16(pages)) = &self.panels;
        pages.0.len() * 4096
    }

    /// Writes `x W^T` to `y`: `x` is `[rows, num_inputs]`, `y` is `[rows, num_outputs]`.
    ///
    /// Allocates nothing. Runs on the threads of `cpu`.
    ///
    /// # Errors
    /// *Misuse* when the lengths are not the same number of rows.
    pub fn forward(&self, cpu: &Cpu, x: &[f32], y: &mut [f32]) -> Result<()> {
        let num_rows = x.len() / self.num_inputs;
        expect_len("input of a linear layer", num_rows * self.num_inputs, x.len())?;
        expect_len("output of a linear layer", num_rows * self.num_outputs, y.len())?;
        // More rows than that go over the weights again.
        let chunks = x.chunks(MAX_ROWS * self.num_inputs);
        for (x, y) in chunks.zip(y.chunks_mut(MAX_ROWS * self.num_outputs)) {
            match &self.panels {
                Panels::F32(pages) => self.chunk::<f32>(cpu, x, pages, y),
                Panels::Bf16(pages) => self.chunk::<half::bf16>(cpu, x, pages, y),
            }
        }
        Ok(())
    }

    /// At most [`MAX_ROWS`] rows.
    fn chunk<W: Weight>(&self, cpu: &Cpu, x: &[f32], pages: &Pages, y: &mut [f32]) {
        let weights: &[W] = bytemuck::cast_slice(&pages.0);
        let panel_len = self.num_inputs * PANEL;
        cpu.team.run_panels(y, self.num_outputs, &|panel, lanes| {
            let panel_weights = &weights[panel * panel_len..][..panel_len];
            let mut first = 0;
            for block in panel_weights.chunks(BLOCK_BYTES / size_of::<W>()) {
                let ahead = &weights[panel * panel_len + first * PANEL + block.len()..];
                simd::accumulate(cpu.isa, &x[first..], self.num_inputs, block, lanes, ahead);
                first += block.len() / PANEL;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Each row's bits are those of the definition, however many rows and threads there are.
        #[test]
        fn rows_are_independent(
            (inputs, outputs, rows) in (1usize..300, 1usize..100, 1usize..70),
            threads in 1usize..4,
            seed in any::<u32>(),
        ) {
            let mut state = seed;
            let mut random = |n: usize| -> Vec<f32> {
                (0..n).map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 8) as f32 / (1 << 23) as f32 - 1.0
                }).collect()
            };
            let (x, w) = (random(rows * inputs), random(outputs * inputs));
            let halves: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
            let cpu = Cpu::with_threads(threads).unwrap();
            let layers = [
                (PackedLinear::new(&w, outputs, inputs).unwrap(), w.clone()),
                (PackedLinear::new(&halves, outputs, inputs).unwrap(),
                 halves.iter().map(|w| w.to_f32()).collect()),
            ];
            for (layer, w) in layers {
                let mut y = vec![f32::NAN; rows * outputs];
                layer.forward(&cpu, &x, &mut y).unwrap();
                for (x, y) in x.chunks(inputs).zip(y.chunks(outputs)) {
                    for (w, y) in w.chunks(inputs).zip(y) {
                        let want = x.iter().zip(w).fold(0.0f32, |acc, (x, w)| x.mul_add(*w, acc));
                        prop_assert_eq!(y.to_bits(), want.to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn wrong_lengths_are_misuse_and_write_nothing() {
        let cpu = Cpu::with_threads(1).unwrap();
        let layer = PackedLinear::new(&[1.0f32; 6], 2, 3).unwrap();
        let mut y = [7.0; 2];
        assert!(layer.forward(&cpu, &[1.0; 4], &mut y).is_err());
        assert!(layer.forward(&cpu, &[1.0; 6], &mut y).is_err());
        assert_eq!(y, [7.0; 2]);
        layer.forward(&cpu, &[], &mut []).unwrap();
        assert!(PackedLinear::new(&[1.0f32; 6], 2, 4).is_err());
        assert!(PackedLinear::new(&[1.0f32; 6], 3, 3).is_err());
        assert!(PackedLinear::new::<f32>(&[], 0, 3).is_err());
        assert!(PackedLinear::new::<f32>(&[], 3, 0).is_err());
        assert!(PackedLinear::stack::<f32>(&[], 3).is_err());
    }
}
