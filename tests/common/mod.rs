//! What several tests share.
#![allow(dead_code)] // each test crate uses its part

pub mod toy;
