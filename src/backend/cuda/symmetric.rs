//! Slabs: memory that the kernels of every rank of a group reach. Where ranks are threads it is ordinary memory of
//! each device. Where they are processes it is physical memory without an address, which each process maps at one
//! of its own; what travels is a file descriptor.

use std::ffi::{c_int, c_void};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Cuda;
use super::memory::Memory;
use super::probe;
use crate::comm::geometry::IDENTITY_OFFSET;
use crate::comm::parcel::{Descriptor, Offer, Parcel, Reader, Writer};
use crate::error::{Error, Result};

/// All bits set is an empty slab, see PROTOCOL.md.
const EMPTY: u8 = 0xFF;

/// One rank's slab as another rank, or it itself, reaches it.
#[derive(Debug)]
pub(super) enum Slab {
    Memory(Arc<Memory>),
    Mapped(Mapping),
}

impl Slab {
    /// An empty slab of this rank, and what its peers need to reach it.
    pub(super) fn new(cuda: &Cuda, bytes: usize, is_between_processes: bool) -> Result<(SlabOffer, Self)> {
        if is_between_processes {
            let (shared, mapping) = SharedMemory::new(cuda, bytes)?;
            return Ok((SlabOffer::Shared(shared), Self::Mapped(mapping)));
        }
        let memory = Arc::new(Memory::new(cuda, bytes, EMPTY)?);
        Ok((SlabOffer::Memory(Arc::clone(&memory)), Self::Memory(memory)))
    }

    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Memory(memory) => memory.address,
            Self::Mapped(mapping) => mapping.address,
        }
    }
}

/// What a rank offers its peers.
#[derive(Debug)]
pub(super) enum SlabOffer {
    Memory(Arc<Memory>),
    Shared(SharedMemory),
}

impl SlabOffer {
    /// The slab for the kernels of `cuda`, whose peer has offered it.
    pub(super) fn reach(&self, cuda: &Cuda, bytes: usize) -> Result<Slab> {
        match self {
            Self::Memory(memory) => Ok(Slab::Memory(Arc::clone(memory))),
            Self::Shared(shared) => shared.map(cuda, bytes).map(Slab::Mapped),
        }
    }
}

impl Offer for SlabOffer {
    const KIND: &'static str = "slab of a CUDA device";

    fn pack(&self) -> Result<Parcel> {
        let Self::Shared(shared) = self else { return Err(not_shareable()) };
        let bytes = Writer::default().usize(shared.bytes).u64(shared.identity).0;
        Ok(Parcel { bytes, descriptors: vec![copy(&shared.descriptor)?] })
    }

    fn unpack(mut parcel: Parcel) -> Option<Self> {
        let mut reader = Reader(&parcel.bytes);
        let (bytes, identity) = (reader.usize()?, reader.u64()?);
        reader.end(())?;
        let descriptor = parcel.descriptors.pop()?;
        Some(Self::Shared(SharedMemory { descriptor, bytes, identity }))
    }
}

/// Physical memory of a device, which processes can map as long as there is a descriptor or a mapping of it.
#[derive(Debug)]
pub(super) struct SharedMemory {
    descriptor: Descriptor,
    bytes: usize,
    /// What it holds at [`IDENTITY_OFFSET`], so that no other memory is taken for it.
    identity: u64,
}

/// What only this file calls: a driver without them serves all else.
const SYMBOLS: &[&str] = &[
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemGetAllocationGranularity",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
];

const HANDLE_TYPE: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

impl SharedMemory {
    /// At least `bytes` bytes of the device of `cuda`, as an empty slab, and mapped for it.
    fn new(cuda: &Cuda, bytes: usize) -> Result<(Self, Mapping)> {
        expect_shareable(cuda)?;
        cuda.bind()?;
        // SAFETY: zero is a value of all its fields, and "none" of those that are not set below.
        let mut kind: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        kind.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.requestedHandleTypes = HANDLE_TYPE;
        kind.location = location(cuda);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut granularity = 0;
        // SAFETY: both pointers are valid for the call.
        let asked = unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &kind, minimum).result() };
        cuda.check("cuMemGetAllocationGranularity", asked)?;
        let bytes = bytes.next_multiple_of(granularity.max(1));

        let mut handle = Handle(0);
        // SAFETY: as above. `Handle` releases it.
        let created = unsafe { sys::cuMemCreate(&mut handle.0, bytes, &kind, 0).result() };
        cuda.check("cuMemCreate", created)?;
        let mapping = Mapping::new(cuda, &handle, bytes)?;
        // SAFETY: the mapping has `bytes` bytes, and any bytes are fine for its users.
        let filled = unsafe { result::memset_d8_async(mapping.address, EMPTY, bytes, cuda.stream()) };
        cuda.check("cuMemsetD8Async", filled)?;
        let identity = random();
        mapping.write_identity(identity)?;

        let mut number: c_int = -1;
        // SAFETY: for this type of handle the driver writes an `int`.
        let exported = unsafe {
            let place = std::ptr::from_mut(&mut number).cast::<c_void>();
            sys::cuMemExportToShareableHandle(place, handle.0, HANDLE_TYPE, 0).result()
        };
        cuda.check("cuMemExportToShareableHandle", exported)?;
        Ok((Self { descriptor: own(number)?, bytes, identity }, mapping))
    }

    /// Maps it for the device of `cuda`, if it is what the peer has said and has `needed` bytes.
    fn map(&self, cuda: &Cuda, needed: usize) -> Result<Mapping> {
        expect_shareable(cuda)?;
        if self.bytes < needed {
            return Err(Error::fault("shared memory", format!("{needed} bytes"), self.bytes));
        }
        cuda.bind()?;
        let mut handle = Handle(0);
        // SAFETY: for this type of handle the pointer is the number of a descriptor, which is open.
        let imported = unsafe {
            let number = std::ptr::without_provenance_mut(number(&self.descriptor) as usize);
            sys::cuMemImportFromShareableHandle(&mut handle.0, number, HANDLE_TYPE).result()
        };
        cuda.check("cuMemImportFromShareableHandle", imported)?;
        let mapping = Mapping::new(cuda, &handle, self.bytes)?;
        let identity = mapping.read_identity()?;
        if identity != self.identity {
            let wanted = format!("what the peer offered, with identity {:x}", self.identity);
            return Err(Error::fault("shared memory", wanted, format!("memory with {identity:x}")));
        }
        Ok(mapping)
    }
}

/// The right to map physical memory, released on drop. What is mapped stays.
struct Handle(sys::CUmemGenericAllocationHandle);

impl Drop for Handle {
    fn drop(&mut self) {
        if self.0 != 0 {
            // SAFETY: created or imported once, released once.
            let _ = unsafe { sys::cuMemRelease(self.0) };
        }
    }
}

/// Addresses of this process with physical memory behind them, and access for one device. Undone on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    cuda: Cuda,
    address: u64,
    bytes: usize,
    is_mapped: bool,
}

impl Mapping {
    fn new(cuda: &Cuda, handle: &Handle, bytes: usize) -> Result<Self> {
        // What has been done is undone if the rest fails.
        let mut mapping = Self { cuda: cuda.clone(), address: 0, bytes, is_mapped: false };
        // SAFETY: the pointer is valid for the call.
        let reserved = unsafe { sys::cuMemAddressReserve(&mut mapping.address, bytes, 0, 0, 0).result() };
        cuda.check("cuMemAddressReserve", reserved)?;
        // SAFETY: the addresses are reserved, and used by nobody yet.
        let mapped = unsafe { sys::cuMemMap(mapping.address, bytes, 0, handle.0, 0).result() };
        cuda.check("cuMemMap", mapped)?;
        mapping.is_mapped = true;
        let access = sys::CUmemAccessDesc {
            location: location(cuda),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: all of the range is mapped, and there is one description.
        let allowed = unsafe { sys::cuMemSetAccess(mapping.address, bytes, &access, 1).result() };
        cuda.check("cuMemSetAccess", allowed)?;
        Ok(mapping)
    }

    /// Returns when it is there.
    fn write_identity(&self, identity: u64) -> Result<()> {
        let place = self.address + IDENTITY_OFFSET as u64;
        // SAFETY: the mapping has room for it: no granularity is smaller. The driver has read pageable memory when it
        // returns.
        let copy = unsafe { result::memcpy_htod_async(place, &[identity], self.cuda.stream()) };
        self.cuda.check("cuMemcpyHtoDAsync", copy)?;
        self.cuda.synchronize()
    }

    fn read_identity(&self) -> Result<u64> {
        let mut identity = [0];
        let place = self.address + IDENTITY_OFFSET as u64;
        // SAFETY: as above, written.
        let copy = unsafe { result::memcpy_dtoh_async(&mut identity, place, self.cuda.stream()) };
        self.cuda.check("cuMemcpyDtoHAsync", copy)?;
        self.cuda.synchronize()?;
        Ok(identity[0])
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Kernels of this rank may yet write to it if they cannot be waited for: then it stays.
        if self.address == 0 || self.cuda.synchronize().is_err() {
            return;
        }
        // SAFETY: reserved and mapped by `new`, undone once; the only stream that uses these addresses is idle. Peers
        // have addresses of their own, and the memory is there until the last of them is gone.
        unsafe {
            if self.is_mapped {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
            }
            let _ = sys::cuMemAddressFree(self.address, self.bytes);
        }
    }
}

/// Whether the driver and the device of `cuda` let processes map each other's memory.
fn expect_shareable(cuda: &Cuda) -> Result<()> {
    use sys::CUdevice_attribute as Attribute;
    probe::expect_symbols(SYMBOLS, "one that maps memory of other processes")?;
    for (attribute, what) in [
        (
            Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
            "maps memory at addresses of choice",
        ),
        (
            Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            "hands memory to other processes as a file descriptor",
        ),
    ] {
        if cuda.attribute(attribute)? == 0 {
            let subject = format!("device {}", cuda.ordinal());
            return Err(Error::unsupported(subject, format!("one that {what}"), "one that does not"));
        }
    }
    Ok(())
}

fn location(cuda: &Cuda) -> sys::CUmemLocation {
    const _: () = assert!(size_of::<sys::CUmemLocation>() == 2 * size_of::<c_int>());
    // SAFETY: zero is a value of both fields.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    // SAFETY: the second field is the ordinal in all versions of the bindings; newer ones have it in a union.
    unsafe { (&raw mut location).cast::<c_int>().add(1).write(cuda.device()) };
    location
}

/// A number that no other process draws at the same time.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

#[cfg(target_os = "linux")]
fn own(number: c_int) -> Result<Descriptor> {
    use std::os::fd::{FromRawFd, OwnedFd};
    // SAFETY: the driver has just opened it for its caller.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    // A process that is started meanwhile does not get it.
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
        .map_err(|error| Error::fault("descriptor of a slab", "one for this process alone", error))?;
    Ok(descriptor)
}

#[cfg(target_os = "linux")]
fn copy(descriptor: &Descriptor) -> Result<Descriptor> {
    descriptor.try_clone().map_err(|error| Error::fault("descriptor of a slab", "a copy of it", error))
}

#[cfg(target_os = "linux")]
fn number(descriptor: &Descriptor) -> c_int {
    std::os::fd::AsRawFd::as_raw_fd(descriptor)
}

fn not_shareable() -> Error {
    Error::unsupported("ranks as processes", "memory that can be handed over", "memory of one process")
}

#[cfg(not(target_os = "linux"))]
fn own(_: c_int) -> Result<Descriptor> {
    Err(not_shareable())
}

#[cfg(not(target_os = "linux"))]
fn copy(descriptor: &Descriptor) -> Result<Descriptor> {
    match *descriptor {}
}

#[cfg(not(target_os = "linux"))]
fn number(descriptor: &Descriptor) -> c_int {
    match *descriptor {}
}
