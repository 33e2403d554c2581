//! The GGUF file: metadata that must be there, tensors that must have the right shape.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};

/// An open GGUF file of a Llama model.
pub struct Gguf {
    content: Content,
    file: BufReader<File>,
}

/// Sizes of a Llama model.
#[derive(Clone, Copy, Debug)]
pub struct LlamaShape {
    pub hidden: usize,
    pub intermediate: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub context: usize,
    pub rms_epsilon: f32,
    pub rope_theta: f32,
}

impl Gguf {
    /// Reads the header.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        let file = File::open(path).with_context(|| format!("cannot open the model {name}"))?;
        let mut file = BufReader::new(file);
        let content = Content::read(&mut file).with_context(|| format!("{name} is not a whole GGUF file"))?;
        Ok(Self { content, file })
    }

    fn value(&self, key: &str) -> Result<&Value> {
        self.content.metadata.get(key).with_context(|| format!("the GGUF file has no key {key}"))
    }

    fn count(&self, key: &str) -> Result<usize> {
        Ok(self.value(key)?.to_u32().with_context(|| format!("GGUF key {key}"))? as usize)
    }

    /// A list of strings.
    pub fn strings(&self, key: &str) -> Result<Vec<String>> {
        let values = self.value(key)?.to_vec().with_context(|| format!("GGUF key {key}"))?;
        values.iter().map(|value| Ok(value.to_string()?.clone())).collect()
    }

    /// A list of integers.
    pub fn ints(&self, key: &str) -> Result<Vec<i32>> {
        let values = self.value(key)?.to_vec().with_context(|| format!("GGUF key {key}"))?;
        values.iter().map(|value| Ok(value.to_i32()?)).collect()
    }

    /// The model's sizes.
    pub fn shape(&self) -> Result<LlamaShape> {
        let architecture = self.value("general.architecture")?.to_string()?;
        ensure!(architecture == "llama", "the model is a {architecture}, not a llama");
        let num_heads = self.count("llama.attention.head_count")?;
        let hidden = self.count("llama.embedding_length")?;
        let shape = LlamaShape {
            hidden,
            intermediate: self.count("llama.feed_forward_length")?,
            num_layers: self.count("llama.block_count")?,
            num_heads,
            num_kv_heads: self.count("llama.attention.head_count_kv")?,
            head_dim: self.count("llama.rope.dimension_count")?,
            vocab: self.count("llama.vocab_size")?,
            context: self.count("llama.context_length")?,
            rms_epsilon: self.value("llama.attention.layer_norm_rms_epsilon")?.to_f32()?,
            rope_theta: self.value("llama.rope.freq_base")?.to_f32()?,
        };
        let LlamaShape { num_kv_heads, head_dim, .. } = shape;
        ensure!(
            num_kv_heads > 0 && num_heads % num_kv_heads == 0 && num_heads * head_dim == hidden,
            "{num_heads} heads of {head_dim} with {num_kv_heads} KV heads do not make a row of {hidden}"
        );
        Ok(shape)
    }

    /// A matrix, `[rows, columns]`, dequantised exactly to f32.
    pub fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Vec<f32>> {
        self.floats(name, &[rows, columns])
    }

    /// A vector.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        self.floats(name, &[len])
    }

    /// A query or key projection, `[heads * head_dim, columns]`, in the half-split order.
    ///
    /// llama.cpp stores the rows of a head so that rotary pairs are neighbours: row `2 i + j` holds what
    /// is row `i + j * head_dim / 2` in the published model.
    pub fn rotary_matrix(
        &mut self,
        name: &str,
        rows: usize,
        columns: usize,
        head_dim: usize,
    ) -> Result<Vec<f32>> {
        let stored = self.matrix(name, rows, columns)?;
        let mut matrix = Vec::with_capacity(stored.len());
        for head in stored.chunks_exact(head_dim * columns) {
            let row = |i: usize| &head[i * columns..(i + 1) * columns];
            (0..head_dim).step_by(2).for_each(|i| matrix.extend_from_slice(row(i)));
            (1..head_dim).step_by(2).for_each(|i| matrix.extend_from_slice(row(i)));
        }
        Ok(matrix)
    }

    fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(info) = self.content.tensor_infos.get(name) else {
            bail!("the GGUF file has no tensor {name}");
        };
        let seen = info.shape.dims();
        ensure!(seen == shape, "tensor {name} has shape {seen:?}, not {shape:?}");
        let tensor = self
            .content
            .tensor(&mut self.file, name, &Device::Cpu)
            .and_then(|quantised| quantised.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1());
        tensor.with_context(|| format!("tensor {name}"))
    }
}
