//! Ranks as devices that reach each other's memory, one thread or one process each; or several ranks on one device.

use std::sync::{Arc, OnceLock};

use bytemuck::Pod;
use cudarc::driver::result;

use super::context::{Cuda, StreamId, Uuid};
use super::launch::{
    AllReduceKernels, AllReduceNorm, FP8_PER_ROW, FP8_STATIC, FaultRecord, NORM, WEIGHT_PLUS_ONE,
};
use super::memory::{DeviceSlice, DeviceSliceMut, HostWords, Memory};
use super::symmetric::{Slab, random};
use crate::comm::geometry::Geometry;
use crate::comm::parcel::{Offer, Parcel, Reader, Writer};
use crate::comm::plan::{Rank, Shape};
use crate::comm::{Call, GroupBackend, GroupConfig, Quantized, Rendezvous, Tag, sealed};
use crate::element::Element;
use crate::error::{Error, Result};

/// One rank's part of a group.
#[derive(Debug)]
pub struct Member {
    // The kernels' memory: freed in this order, each after the stream is idle, and slabs with the last rank.
    _epochs: Memory,
    fault: HostWords<3>,
    slabs: Vec<Slab>,
    cuda: Cuda,
    kernels: AllReduceKernels,
    shape: Shape,
    geometry: Geometry,
    config: GroupConfig,
    /// What all calls have in common.
    arguments: AllReduceNorm,
}

/// What a rank tells the others first.
struct Device {
    /// Of a thread of this process: keeps the context that the others enable access to.
    cuda: Option<Cuda>,
    uuid: Uuid,
    /// The process and its stream.
    stream: [u64; 3],
    /// Blocks of a group's kernels that can be resident at the same time.
    resident_blocks: usize,
}

impl Offer for Device {
    const KIND: &'static str = "CUDA device";

    fn pack(&self) -> Result<Parcel> {
        let writer = Writer::default().bytes(&self.uuid).usize(self.resident_blocks);
        let bytes = self.stream.iter().fold(writer, |writer, word| writer.u64(*word)).0;
        Ok(Parcel { bytes, descriptors: Vec::new() })
    }

    fn unpack(parcel: Parcel) -> Option<Self> {
        let mut reader = Reader(&parcel.bytes);
        let uuid = reader.bytes()?.try_into().ok()?;
        let resident_blocks = reader.usize()?;
        let stream = [reader.u64()?, reader.u64()?, reader.u64()?];
        reader.end(Self { cuda: None, uuid, stream, resident_blocks })
    }
}

impl sealed::Sealed for Cuda {}

impl GroupBackend for Cuda {
    type Slice<'a, T: Pod> = DeviceSlice<'a, T>;
    type SliceMut<'a, T: Pod> = DeviceSliceMut<'a, T>;
    type Member<T: Element> = Member;

    fn join<T: Element>(
        &self,
        rendezvous: &Rendezvous,
        rank: Rank,
        shape: Shape,
        config: &GroupConfig,
    ) -> Result<Member> {
        // Each stage is passed by all ranks or by none.
        let prepared = AllReduceKernels::load::<T>(self, &shape)
            .and_then(|kernels| Ok((self.describe(&kernels, &shape, config)?, kernels)));
        let (devices, kernels) = rendezvous.exchange_and_keep(rank, 1, prepared)?;

        let allocated = agree(&devices, &shape, config).and_then(|geometry| {
            devices.iter().try_for_each(|device| match &device.cuda {
                Some(cuda) => self.enable_peer(cuda),
                None => self.expect_reach(&device.uuid),
            })?;
            let (offer, own) = Slab::new(self, geometry.slab_bytes, rendezvous.is_between_processes())?;
            Ok((offer, (own, geometry)))
        });
        let (offers, (own, geometry)) = rendezvous.exchange_and_keep(rank, 2, allocated)?;

        let mut own = Some(own);
        let slabs =
            shape.world.ranks().zip(&offers).map(|(other, offer)| match own.take_if(|_| other == rank) {
                Some(own) => Ok(own),
                None => offer
                    .reach(self, geometry.slab_bytes)
                    .map_err(|error| error.elsewhere(format!("{other}'s slab"))),
            });
        let prepared = slabs.collect::<Result<Vec<Slab>>>().and_then(|slabs| {
            let epochs = self.upload(&vec![config.first_epoch; geometry.max_blocks as usize])?;
            Ok(((), (slabs, epochs.into_memory(), HostWords::new(self)?)))
        });
        // Passed when all ranks reach all slabs.
        let (_, (slabs, epochs, fault)) = rendezvous.exchange_and_keep(rank, 3, prepared)?;

        let mut arguments = AllReduceNorm {
            epochs: epochs.address,
            fault: fault.address,
            packs_offset: geometry.packs_offset,
            escapes_offset: geometry.escapes_offset,
            wait_limit_ns: u64::try_from(config.time_limit.as_nanos()).unwrap_or(u64::MAX),
            rank: rank.index() as u32,
            hidden: shape.hidden as u32,
            warps_per_group: geometry.warps_per_group,
            max_blocks: geometry.max_blocks,
            block_packs: geometry.block_packs,
            ..AllReduceNorm::default()
        };
        for (address, slab) in arguments.slabs.iter_mut().zip(&slabs) {
            *address = slab.address();
        }
        let cuda = self.clone();
        Ok(Member {
            _epochs: epochs,
            fault,
            slabs,
            cuda,
            kernels,
            shape,
            geometry,
            config: *config,
            arguments,
        })
    }

    fn len<T: Pod>(slice: DeviceSlice<'_, T>) -> usize {
        slice.len
    }

    fn len_mut<T: Pod>(slice: &DeviceSliceMut<'_, T>) -> usize {
        slice.len
    }

    fn reduce<T: Element>(member: &mut Member, call: Call<'_, Self, T>) -> Result<()> {
        <Self as GroupBackend>::check::<T>(member)?;
        let mut arguments = member.arguments;
        let mut ranges = Ranges { stream: member.cuda.stream_id(), used: Default::default() };
        arguments.rows = call.rows as u32;
        arguments.partial = ranges.read("partial", call.partial, 16)?;
        let norm = call.norm.as_ref().map(|inputs| inputs.norm);
        if let Some(inputs) = call.norm {
            arguments.flags |= NORM | if inputs.norm.weight_is_plus_one() { WEIGHT_PLUS_ONE } else { 0 };
            arguments.epsilon = inputs.norm.epsilon();
            arguments.residual = ranges.write("residual", &inputs.residual, 16)?;
            arguments.weight = ranges.read("norm weight", inputs.weight, 16)?;
        }
        if let Some(output) = &call.output {
            arguments.output = ranges.write("output", output, 16)?;
        }
        match &call.quantized {
            Some(Quantized::Static { values, scale }) => {
                arguments.flags |= FP8_STATIC;
                arguments.static_scale = *scale;
                arguments.quantized = ranges.write("quantized output", values, 8)?;
            }
            Some(Quantized::PerRow { values, scales }) => {
                arguments.flags |= FP8_PER_ROW;
                arguments.quantized = ranges.write("quantized output", values, 8)?;
                arguments.scales = ranges.write("scales", scales, 4)?;
            }
            None => {}
        }
        let geometry = &member.geometry;
        let blocks = geometry.blocks(call.rows);
        arguments.block_rows = arguments.rows.div_ceil(blocks);
        let algorithm = member.shape.algorithm(call.rows);
        arguments.tag = Tag::new(call.rows, algorithm, norm.as_ref()).0;
        member.kernels.launch(&member.cuda, algorithm, blocks, geometry.threads(), &mut arguments)
    }

    fn check<T: Element>(member: &Member) -> Result<()> {
        match FaultRecord::read(member.fault.load()) {
            None => Ok(()),
            Some(FaultRecord { cause, rank, peer, phase, epoch }) => {
                Err(cause.error(rank, peer, phase, epoch, member.config.time_limit))
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // What fails may pass: it is asked twice.
        if self.cuda.synchronize().is_err() && self.cuda.synchronize().is_err() {
            // Kernels of this rank may yet write into peers' slabs: then they are never freed.
            self.slabs.drain(..).for_each(std::mem::forget);
        }
    }
}

impl Cuda {
    fn describe(&self, kernels: &AllReduceKernels, shape: &Shape, config: &GroupConfig) -> Result<Device> {
        let threads = Geometry::new(shape, config.max_blocks, config.max_warps_per_group).threads();
        let mut per_multiprocessor = usize::MAX;
        for kernel in kernels.all() {
            // SAFETY: the kernel is loaded.
            let blocks = unsafe {
                let shared_bytes = shape.hidden * 2;
                result::occupancy::max_active_block_per_multiprocessor(
                    kernel.function,
                    threads as i32,
                    shared_bytes,
                )
            };
            let blocks = self.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", blocks)?;
            per_multiprocessor = per_multiprocessor.min(blocks as usize);
        }
        let resident_blocks = per_multiprocessor.saturating_mul(self.multiprocessors()?);
        static PROCESS: OnceLock<u64> = OnceLock::new();
        let [ordinal, stream] = self.stream_id().words();
        let stream = [*PROCESS.get_or_init(random), ordinal, stream];
        Ok(Device { cuda: Some(self.clone()), uuid: self.uuid()?, stream, resident_blocks })
    }
}

/// The geometry that fits the smallest share of a device that any rank has: all its blocks are resident.
fn agree(devices: &[Arc<Device>], shape: &Shape, config: &GroupConfig) -> Result<Geometry> {
    for (rank, device) in devices.iter().enumerate() {
        if devices[..rank].iter().any(|other| other.stream == device.stream) {
            let seen = format!("rank {rank} on the stream of another rank");
            return Err(Error::misuse("devices of the group", "a `Cuda` of its own for every rank", seen));
        }
    }
    let share = |device: &Device| {
        let ranks = devices.iter().filter(|other| other.uuid == device.uuid).count();
        device.resident_blocks / ranks
    };
    let smallest = devices.iter().map(|device| share(device)).min().unwrap_or(0);
    if smallest == 0 {
        let wanted = "room for a block of every rank";
        return Err(Error::unsupported("devices of the group", wanted, "a device with less"));
    }
    Ok(Geometry::new(shape, smallest.min(config.max_blocks), config.max_warps_per_group))
}

/// The memory that a call uses: checked against each other.
struct Ranges {
    stream: StreamId,
    used: [Option<Range>; 6],
}

#[derive(Clone, Copy)]
struct Range {
    name: &'static str,
    start: u64,
    end: u64,
    is_written: bool,
}

impl Ranges {
    fn read<T>(&mut self, name: &'static str, slice: DeviceSlice<'_, T>, alignment: u64) -> Result<u64> {
        self.add::<T>(name, slice.stream, slice.address, slice.len, alignment, false)
    }

    fn write<T>(&mut self, name: &'static str, slice: &DeviceSliceMut<'_, T>, alignment: u64) -> Result<u64> {
        self.add::<T>(name, slice.stream, slice.address, slice.len, alignment, true)
    }

    fn add<T>(
        &mut self,
        name: &'static str,
        stream: StreamId,
        start: u64,
        len: usize,
        alignment: u64,
        is_written: bool,
    ) -> Result<u64> {
        if stream != self.stream {
            return Err(Error::misuse(name, "memory of the `Cuda` that joined the group", "another's"));
        }
        if start == 0 || !start.is_multiple_of(alignment) {
            let wanted = format!("an address that is a multiple of {alignment}");
            return Err(Error::misuse(name, wanted, format!("{start:#x}")));
        }
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| u64::try_from(bytes).ok());
        let Some(end) = bytes.and_then(|bytes| start.checked_add(bytes)) else {
            return Err(Error::misuse(
                name,
                "memory that ends in the address space",
                format!("{len} elements"),
            ));
        };
        for slot in &mut self.used {
            match slot {
                Some(other) if (is_written || other.is_written) && start < other.end && other.start < end => {
                    return Err(Error::misuse(
                        name,
                        format!("memory apart from {}", other.name),
                        "an overlap",
                    ));
                }
                Some(_) => {}
                None => {
                    *slot = Some(Range { name, start, end, is_written });
                    break;
                }
            }
        }
        Ok(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::WorldSize;

    fn device(uuid: u8, stream: u64) -> Arc<Device> {
        Arc::new(Device {
            cuda: None,
            uuid: [uuid; 16],
            stream: [uuid.into(), 0, stream],
            resident_blocks: 12,
        })
    }

    /// Whatever the ordinals that their processes give it: ranks with one device share its room.
    #[test]
    fn ranks_on_one_device_share_its_blocks() {
        let config = GroupConfig::new(64, 512);
        let shape = config.terms::<half::bf16>(WorldSize::Four).unwrap().shape;
        let max_blocks = |devices: &[Arc<Device>]| agree(devices, &shape, &config).map(|g| g.max_blocks);
        let spread: Vec<_> = (0..4).map(|i| device(i, 0)).collect();
        assert_eq!(max_blocks(&spread).unwrap(), 12);
        let packed = Device::unpack(spread[3].pack().unwrap()).unwrap();
        assert_eq!(max_blocks(&[device(0, 0), device(1, 0), device(3, 1), Arc::new(packed)]).unwrap(), 6);
        assert_eq!(max_blocks(&(0..4).map(|i| device(7, i)).collect::<Vec<_>>()).unwrap(), 3);
        assert!(max_blocks(&[device(0, 0), device(1, 0), device(0, 0), device(2, 0)]).is_err(), "one stream");
    }
}
