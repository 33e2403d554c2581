//! What cuobjdump says of kernels: their resources, and what is in their machine code.

use std::collections::BTreeMap;

/// In every block, for the system; cuobjdump counts it as the kernel's.
pub const RESERVED_SHARED: u32 = 1024;

/// Accesses of one kind to global memory.
#[derive(Debug, Default)]
pub struct Accesses {
    pub by_bits: BTreeMap<u32, u32>,
    /// Of 128 bits or more, strong at the scope of the system: what peers may touch at the same time.
    pub wide_strong_sys: u32,
}

impl Accesses {
    fn add(&mut self, op: &str) {
        let bits = op.split('.').find_map(|part| match part {
            "U8" | "S8" => Some(8),
            "U16" | "S16" => Some(16),
            "64" | "128" | "256" => part.parse().ok(),
            _ => None,
        });
        let bits = bits.unwrap_or(32);
        *self.by_bits.entry(bits).or_default() += 1;
        self.wide_strong_sys += u32::from(bits >= 128 && op.contains(".STRONG.SYS"));
    }

    pub fn wide(&self) -> u32 {
        self.by_bits.range(128..).map(|(_, count)| count).sum()
    }

    pub fn narrow(&self) -> u32 {
        self.by_bits.range(..128).map(|(_, count)| count).sum()
    }
}

/// What cuobjdump says of one kernel.
#[derive(Debug, Default)]
pub struct Kernel {
    pub name: String,
    pub registers: u32,
    pub stack: u32,
    pub local: u32,
    pub shared: u32,
    /// Without padding.
    pub instructions: u32,
    /// Accesses to local memory: spills, and arrays with an index that the compiler did not see through.
    pub spills: u32,
    pub loads: Accesses,
    pub stores: Accesses,
    /// From global to shared memory.
    pub async_copies: Accesses,
    pub matrix_loads: u32,
    pub multiplications: u32,
    pub sys_fences: u32,
    pub gpu_fences: u32,
    pub atomics: u32,
    pub sys_atomics: u32,
    pub touches_memory: bool,
    /// For the kernels before it, before it touches memory: it may be launched as a dependent.
    pub waits_first: bool,
    /// A fence whose error barrier is still to come.
    pub waits_for_errbar: bool,
}

impl Kernel {
    fn from_resources(name: &str, line: &str) -> Result<Self, String> {
        let field = |key: &str| -> Result<u32, String> {
            let words = line.split_whitespace().filter_map(|word| word.split_once(':'));
            let value = words.filter(|(name, _)| *name == key).map(|(_, value)| value).next();
            value.and_then(|value| value.parse().ok()).ok_or_else(|| format!("{name}: no {key} in {line:?}"))
        };
        Ok(Self {
            name: name.to_owned(),
            registers: field("REG")?,
            stack: field("STACK")?,
            local: field("LOCAL")?,
            shared: field("SHARED")?.saturating_sub(RESERVED_SHARED),
            ..Self::default()
        })
    }

    fn add_instruction(&mut self, op: &str) {
        // The whole word up to the dot: LDGSTS is no LDG.
        let head = op.split('.').next().unwrap_or(op);
        if head == "NOP" {
            return;
        }
        self.instructions += 1;
        self.waits_first |= head == "ACQBULK" && !self.touches_memory;
        self.touches_memory |=
            ["LDG", "LD", "LDGSTS", "STG", "ST", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP"].contains(&head);
        match head {
            "LDL" | "STL" => self.spills += 1,
            // LD and ST are generic: the compiler lost the address space. Global is the worst case.
            "LDG" | "LD" => self.loads.add(op),
            "STG" | "ST" => self.stores.add(op),
            "LDGSTS" => self.async_copies.add(op),
            "LDSM" => self.matrix_loads += 1,
            "HMMA" => self.multiplications += 1,
            "ATOM" | "ATOMG" | "RED" | "REDG" => {
                self.atomics += 1;
                self.sys_atomics += u32::from(op.ends_with(".SYS"));
            }
            "MEMBAR" => self.add_fence(op),
            // Each fence has one. One without a fence belongs to something this parser does not know.
            "ERRBAR" if !std::mem::take(&mut self.waits_for_errbar) => self.sys_fences += 1,
            _ => {}
        }
    }

    fn add_fence(&mut self, op: &str) {
        self.waits_for_errbar = true;
        match op.rsplit('.').next() {
            Some("GPU") => self.gpu_fences += 1,
            Some("CTA") => {}
            // SYS, and whatever a later compiler may call as wide a scope.
            _ => self.sys_fences += 1,
        }
    }
}

/// The kernels in the two outputs of cuobjdump. A kernel that is in one of them only is an error: a parser
/// that sees nothing finds nothing wrong.
pub fn parse(resources: &str, sass: &str) -> Result<Vec<Kernel>, String> {
    let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
    let mut name = "";
    for line in resources.lines().map(str::trim) {
        if let Some(function) = line.strip_prefix("Function ") {
            name = function.trim_end_matches(':');
        } else if line.starts_with("REG:")
            && kernels.insert(name.to_owned(), Kernel::from_resources(name, line)?).is_some()
        {
            return Err(format!("{name} is there twice"));
        }
    }
    let mut current = None;
    for line in sass.lines().map(str::trim) {
        if let Some(function) = line.strip_prefix("Function : ") {
            current = Some(kernels.get_mut(function).ok_or_else(|| format!("{function} has no resources"))?);
        } else if let Some(op) = opcode(line) {
            current.as_mut().ok_or_else(|| format!("{line:?} is in no function"))?.add_instruction(op);
        }
    }
    let kernels: Vec<Kernel> = kernels.into_values().collect();
    match kernels.iter().find(|kernel| kernel.instructions == 0) {
        Some(empty) => Err(format!("{} has no instructions", empty.name)),
        None => Ok(kernels),
    }
}

/// `/*0040*/ @P0 LDG.E.128 R4, desc[UR4][R2.64] ; /* 0x… */` has `LDG.E.128`.
fn opcode(line: &str) -> Option<&str> {
    let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    u32::from_str_radix(address, 16).ok()?;
    let (instruction, _) = rest.split_once(';')?;
    instruction.split_whitespace().find(|word| !word.starts_with('@'))
}
