//! The CUDA backend over the emulated driver, as a machine for the collectives' suite.
#![allow(dead_code)] // each test crate uses its part

use std::time::Duration;

use cuda_emulator as emulator;
use eagle_verify::Element;
use eagle_verify::backend::cuda::{Buffer, Cuda, DeviceSlice, DeviceSliceMut};
use eagle_verify::comm::{Group, GroupConfig, Rendezvous, WorldSize};

use crate::collective::Machine;

/// Rank r runs on device `devices[r]`.
pub struct OnEmulator {
    pub devices: Vec<usize>,
}

impl OnEmulator {
    /// A device for each rank.
    pub fn spread(world: WorldSize) -> Self {
        Self { devices: (0..world.get()).collect() }
    }

    /// All ranks on one device.
    pub fn together(world: WorldSize) -> Self {
        Self { devices: vec![0; world.get()] }
    }

    /// A group whose ranks are all driven from this thread: what runs then depends on the seed alone.
    pub fn form<T: Element>(&self, world: WorldSize, config: GroupConfig) -> Vec<(Cuda, Group<Cuda, T>)> {
        let rendezvous = Rendezvous::new(world, Duration::from_secs(30));
        // In this order, so that memory is where it was the last time.
        let backends: Vec<Cuda> = world.ranks().map(|rank| self.backend(rank.index())).collect();
        std::thread::scope(|scope| {
            let joining: Vec<_> = world
                .ranks()
                .zip(backends)
                .map(|(rank, cuda)| {
                    let rendezvous = &rendezvous;
                    scope.spawn(move || {
                        let group = Group::join(&cuda, rendezvous, rank, config).unwrap();
                        (cuda, group)
                    })
                })
                .collect();
            joining.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

impl Machine for OnEmulator {
    type Backend = Cuda;
    type Buffer<T: bytemuck::Pod> = Buffer<T>;

    fn backend(&self, rank: usize) -> Cuda {
        emulator::install();
        Cuda::with_kernels(self.devices[rank], &[("emulated", emulator::IMAGE)]).unwrap()
    }
    fn upload<T: bytemuck::Pod>(cuda: &Cuda, data: &[T]) -> Buffer<T> {
        cuda.upload(data).unwrap()
    }
    fn slice<T: bytemuck::Pod>(buffer: &Buffer<T>) -> DeviceSlice<'_, T> {
        buffer.slice()
    }
    fn slice_mut<T: bytemuck::Pod>(buffer: &mut Buffer<T>) -> DeviceSliceMut<'_, T> {
        buffer.slice_mut()
    }
    fn download<T: bytemuck::Pod>(cuda: &Cuda, buffer: &Buffer<T>) -> Vec<T> {
        cuda.download(buffer).unwrap()
    }
}
