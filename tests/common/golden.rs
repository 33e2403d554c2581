//! Vectors recorded by an independent implementation (tests/golden/README.md).
#![allow(dead_code)] // each test crate uses its part

use std::path::Path;

use eagle_verify::TokenId;
use safetensors::tensor::SafeTensors;

/// A file of them.
pub struct Golden(Vec<u8>);

impl Golden {
    pub fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        Self(std::fs::read(path).unwrap())
    }

    /// One of the three prompts.
    pub fn prompt(number: usize) -> Self {
        Self::read(&format!("golden_{number}.safetensors"))
    }

    fn data(&self, name: &str) -> Option<Vec<u8>> {
        Some(SafeTensors::deserialize(&self.0).unwrap().tensor(name).ok()?.data().to_vec())
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        let data = self.data(name).unwrap();
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn ints(&self, name: &str) -> Vec<i64> {
        let data = self.data(name).unwrap();
        data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn tokens(&self, name: &str) -> Vec<TokenId> {
        self.ints(name).into_iter().map(|id| TokenId(id as u32)).collect()
    }

    pub fn num_rounds(&self) -> usize {
        (0..).take_while(|round| self.data(&format!("round_root.{round}")).is_some()).count()
    }

    pub fn prompt_text(&self) -> String {
        let (_, header) = SafeTensors::read_metadata(&self.0).unwrap();
        header.metadata().as_ref().unwrap()["prompt"].clone()
    }
}
