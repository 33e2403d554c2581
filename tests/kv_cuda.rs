//! The kernel that moves KV rows, executed in the emulator through the real CUDA backend, in paged caches of every
//! layout: all bytes are compared with those after a byte-wise move.
#![cfg(feature = "cuda")]

use std::collections::BTreeSet;

use cuda_emulator as emulator;
use eagle_verify::backend::cpu::{KvCache, KvShape};
use eagle_verify::backend::cuda::{Cuda, KvLayout, KvMover, KvMoverConfig, KvPlane, SlotMove};
use eagle_verify::{
    DraftTree, Error, ErrorKind, NodeId, OutputLimits, PagePool, PageTable, RequestId, TokenId, Verdict,
    VerifyBatch,
};

mod common;
#[path = "common/device.rs"]
mod device;
use device::{Random, catch_mutants, device, outcome};

/// A cache in one piece of memory, planes at offsets, with bytes between them that nobody may touch.
struct Cache {
    page_size: usize,
    num_pages: usize,
    planes: Vec<(usize, KvLayout)>,
    bytes: Vec<u8>,
}

impl Cache {
    fn new(page_size: usize, num_pages: usize) -> Self {
        Self { page_size, num_pages, planes: Vec::new(), bytes: Vec::new() }
    }

    /// Adds an array of `len` bytes for some layouts, each at an offset in it.
    fn add(&mut self, random: &mut Random, offset: usize, len: usize, layouts: &[(usize, KvLayout)]) {
        let start = self.bytes.len().next_multiple_of(16) + 32 + offset;
        self.planes.extend(layouts.iter().map(|(at, layout)| (start + at, *layout)));
        let missing = start + len + 32 - self.bytes.len();
        let more = random.bytes(missing);
        self.bytes.extend(more);
    }

    /// One of the layouts that engines have, of rows or heads of `width` bytes, at an address that is a multiple of
    /// 16 and `offset` more.
    fn add_random(&mut self, random: &mut Random, width: usize, offset: usize) {
        let (pages, page_size) = (self.num_pages, self.page_size);
        let all = pages * page_size * width;
        let rows = KvLayout::rows(pages, page_size, width);
        match random.below(7) {
            0 => self.add(random, offset, all, &[(0, rows)]),
            1 => {
                let heads = 1 + random.below(5);
                let layout = KvLayout::heads(pages, page_size, heads, width);
                self.add(random, offset, heads * all, &[(0, layout)]);
            }
            // Keys and values of a page beside each other, as two planes or as parts of one.
            2 => {
                let both = KvLayout { page_stride: 2 * rows.page_stride, ..rows };
                self.add(random, offset, 2 * all, &[(0, both), (rows.page_stride, both)]);
            }
            3 => {
                let heads = KvLayout::heads(pages, page_size, 2 * 3, width);
                self.add(random, offset, 6 * all, &[(0, heads)]);
            }
            // A page's rows, then its scales.
            4 => {
                let page_stride = page_size * (width + 4);
                let values = KvLayout { page_stride, ..rows };
                let scales = KvLayout { page_stride, ..KvLayout::rows(pages, page_size, 4) };
                let layouts = [(0, values), (page_size * width, scales)];
                self.add(random, offset, pages * page_stride, &layouts);
            }
            // Rows with gaps.
            5 => {
                let row_stride = width + random.pick(&[1, 4, 16]);
                let page_stride = page_size * row_stride;
                let layout = KvLayout { row_stride, page_stride, ..rows };
                self.add(random, offset, pages * page_stride, &[(0, layout)]);
            }
            // Pages innermost: all first rows, then all second rows.
            _ => {
                let layout = KvLayout { page_stride: width, row_stride: pages * width, ..rows };
                self.add(random, offset, all, &[(0, layout)]);
            }
        }
    }

    /// The bytes after moving rows one after the other, byte by byte: what the kernel is to do.
    fn moved(&self, requests: &[Vec<SlotMove>]) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        for (start, layout) in &self.planes {
            for step in requests.iter().flatten() {
                for part in 0..layout.num_parts {
                    let place = |slot: usize| {
                        let (page, row) = (slot / self.page_size, slot % self.page_size);
                        start
                            + page * layout.page_stride
                            + row * layout.row_stride
                            + part * layout.part_stride
                    };
                    let from = place(step.from);
                    bytes.copy_within(from..from + layout.part_bytes, place(step.to));
                }
            }
        }
        bytes
    }

    fn mover(&self, cuda: &Cuda, address: u64, max_moves: usize) -> Result<KvMover, Error> {
        let planes = self.planes.iter().map(|(offset, layout)| {
            // SAFETY: `add` made room for it; the tests keep the memory.
            unsafe { KvPlane::from_raw(address + *offset as u64, *layout) }
        });
        let config = KvMoverConfig { planes: planes.collect(), page_size: self.page_size, max_moves };
        KvMover::new(cuda, config)
    }
}

/// A tree of up to `max_nodes` nodes whose paths often skip a node and then go on one by one, so that its moves
/// overlap.
fn random_tree(random: &mut Random, max_nodes: usize) -> DraftTree {
    let (size, shape) = (1 + random.below(max_nodes), random.below(4));
    let mut tree = DraftTree::new(TokenId(0));
    while tree.len() < size {
        let last = tree.len() - 1;
        let parent = match shape {
            0 => last,
            1 if last < 2 => 0,
            1 => last,
            2 => last - random.below(3).min(last),
            _ => random.below(tree.len()),
        };
        tree.push(tree.node(parent).unwrap(), TokenId(last as u32 + 1)).unwrap();
    }
    tree
}

/// What a step makes of a tree if the target agrees with the path to a node, and no further.
fn verdict(tree: &DraftTree, prefix: usize, end: NodeId) -> Verdict {
    let mut batch = VerifyBatch::new();
    batch.push(RequestId(0), prefix + 1, tree).unwrap();
    let path = tree.ancestors(end);
    let limits = OutputLimits { stop_tokens: &[], num_remaining: usize::MAX };
    let mut verdict = Verdict::new();
    verdict.walk(&batch.entries()[0], limits, |node| {
        let next = tree.children(node).find(|child| path.iter().any(|other| other == child.index()));
        Ok(next.map_or(TokenId(u32::MAX), |child| tree.token(child)))
    });
    verdict
}

fn slots(table: &PageTable, verdict: &Verdict) -> Vec<SlotMove> {
    let moves = verdict.commit_plan().moves();
    moves.map(|step| SlotMove { from: table.slot(step.from), to: table.slot(step.to) }).collect()
}

/// A batch of requests with pages scattered over a pool, and what a step accepts of each.
struct Batch {
    tables: Vec<PageTable>,
    trees: Vec<DraftTree>,
    verdicts: Vec<Verdict>,
}

impl Batch {
    fn random(random: &mut Random, pool: &PagePool, num_requests: usize, max_nodes: usize) -> Self {
        let mut tables: Vec<_> = (0..num_requests).map(|_| pool.table()).collect();
        let most = 2 * pool.page_size().min(20);
        for _ in 0..3 {
            for table in &mut tables {
                let rows = random.below(most / 3 + 1);
                table.lease(rows).unwrap().commit(rows).unwrap();
            }
        }
        let trees: Vec<_> = tables.iter().map(|_| random_tree(random, max_nodes)).collect();
        let step = |(table, tree): (&PageTable, &DraftTree)| match random.below(5) {
            0 if table.len() == 0 => Verdict::new(), // not even the root
            0 => verdict(tree, table.len(), NodeId::ROOT),
            1 => verdict(tree, table.len(), tree.node(random.below(tree.len())).unwrap()),
            _ => verdict(tree, table.len(), tree.node(tree.len() - 1).unwrap()),
        };
        let verdicts = tables.iter().zip(&trees).map(step).collect();
        Self { tables, trees, verdicts }
    }
}

/// What a suite has tried, so that it can't pass by trying nothing.
#[derive(Debug, Default)]
struct Tried {
    moves: usize,
    overlaps: usize,
    accepted: BTreeSet<usize>,
}

/// Moves of random batches in random caches, by tables and by slots.
fn random_moves(seed: u64, cases: usize, max_requests: usize) -> Result<Tried, String> {
    let (cuda, mut random, mut tried) = (device(), Random::new(seed), Tried::default());
    for case in 0..cases {
        let page_size = random.pick(&[1, 16, 64, 5]);
        let num_requests = case % (max_requests + 1);
        let max_nodes = 1 + random.below(24);
        let num_pages = num_requests * (2 * page_size.min(20) + max_nodes).div_ceil(page_size) + 3;
        let pool = PagePool::new(page_size, num_pages).unwrap();
        let mut batch = Batch::random(&mut random, &pool, num_requests, max_nodes);
        let mut cache = Cache::new(page_size, num_pages);
        for _ in 0..1 + random.below(3) {
            // Narrow units for narrow rows only: each byte is an access of the emulator's.
            let widths: &[usize] =
                if num_requests > 8 { &[1, 6, 36, 128] } else { &[1, 2, 6, 16, 36, 576, 656, 2048] };
            let width = random.pick(widths);
            let offset = if width < 100 { random.pick(&[0, 1, 4, 8]) } else { random.pick(&[0, 0, 8]) };
            cache.add_random(&mut random, width, offset);
        }
        let leases: Vec<_> = batch
            .tables
            .iter_mut()
            .zip(&batch.trees)
            .map(|(table, tree)| table.lease(tree.len()).unwrap())
            .collect();
        let tables = leases.iter().map(|lease| lease.table());
        let requests: Vec<_> = tables.clone().zip(&batch.verdicts).map(|(t, v)| slots(t, v)).collect();
        let want = cache.moved(&requests);

        let device_bytes = outcome(cuda.upload(&cache.bytes))?;
        let mut mover =
            cache.mover(&cuda, device_bytes.address(), 33 * 24).map_err(|error| error.to_string())?;
        let queued = if random.one_in(2) {
            mover.commit(tables.zip(&batch.verdicts).map(|(table, verdict)| (table, verdict.commit_plan())))
        } else {
            mover.move_slots(requests.iter().map(|moves| moves.iter().copied()))
        };
        queued.map_err(|error| error.to_string())?;
        let seen = outcome(cuda.download(&device_bytes))?;
        if let Some(at) = (0..want.len()).find(|at| seen[*at] != want[*at]) {
            let (planes, moves) = (&cache.planes, &requests);
            return Err(format!("case {case}: byte {at}: pages of {page_size}, {planes:?}, {moves:?}"));
        }
        for moves in &requests {
            tried.moves += moves.len();
            tried.overlaps += moves.iter().filter(|a| moves.iter().any(|b| a.to == b.from)).count();
        }
        tried.accepted.extend(batch.verdicts.iter().map(|verdict| verdict.path.len()));
    }
    Ok(tried)
}

/// Moves between pages that are more than 4 GiB from a plane's address: with offsets of 32 bits they would be at no
/// memory at all.
fn far_moves() -> Result<(), String> {
    const STRIDE: usize = 1 << 20;
    let cuda = device();
    let mut bytes = Random::new(8).bytes(STRIDE + 64);
    let near = outcome(cuda.upload(&bytes))?;
    // Only the last two pages are there.
    let layout = KvLayout { page_stride: STRIDE, ..KvLayout::rows(5002, 4, 16) };
    // SAFETY: no row of another page is moved.
    let plane = unsafe { KvPlane::from_raw(near.address() - 5000 * STRIDE as u64, layout) };
    let config = KvMoverConfig { planes: vec![plane], page_size: 4, max_moves: 2 };
    let mut mover = KvMover::new(&cuda, config).map_err(|error| error.to_string())?;
    let moves = [(5001 * 4 + 3, 5000 * 4 + 1), (5001 * 4, 5001 * 4 + 2)];
    mover.move_slots([moves.map(|(from, to)| SlotMove { from, to })]).map_err(|error| error.to_string())?;
    bytes.copy_within(STRIDE + 48..STRIDE + 64, 16);
    bytes.copy_within(STRIDE..STRIDE + 16, STRIDE + 32);
    if outcome(cuda.download(&near))? == bytes { Ok(()) } else { Err("far rows differ".into()) }
}

#[test]
fn moves_equal_the_byte_wise_moves() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    let few = random_moves(1, 600, 5).unwrap();
    assert!(few.moves > 2000 && few.overlaps > 1000, "{few:?}");
    let many = random_moves(2, 3 * 34, 33).unwrap();
    far_moves().unwrap();
    assert!(many.moves > 2000 && many.accepted.len() > 15 && many.accepted.contains(&0), "{many:?}");
}

/// Every schedule gives the same, without a race.
#[test]
fn schedules_make_no_difference() {
    let _machine = emulator::exclusive();
    for seed in emulator::seeds(6) {
        emulator::configure(&emulator::Config::checked(seed));
        random_moves(seed, 16, 5).unwrap_or_else(|seen| panic!("EMU_SEED={seed}: {seen}"));
    }
    emulator::configure(&emulator::Config { max_resident_blocks: 4, ..emulator::Config::checked(9) });
    random_moves(9, 34, 33).unwrap();
}

/// The same comparison sees each of these faults.
#[test]
fn faults_are_caught() {
    let _machine = emulator::exclusive();
    assert_eq!(catch_mutants("kv", &[3], |seed| random_moves(seed, 40, 5).map(drop)), 9);
}

/// The device's cache after a step holds what the CPU's holds.
#[test]
fn moves_are_those_of_the_cpu_cache() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(1));
    const PAGES: usize = 24;
    let shape = KvShape { num_layers: 2, num_kv_heads: 2, head_dim: 32 };
    let (page_size, row_bytes) = (KvCache::PAGE_SIZE, 2 * 32 * 4);
    let (cuda, mut random) = (device(), Random::new(4));
    let pool = PagePool::new(page_size, PAGES).unwrap();
    let mut batch = Batch::random(&mut random, &pool, 6, 20);
    // Keys and values of layer 0, then of layer 1.
    let mut cache = Cache::new(page_size, PAGES);
    for _ in 0..4 {
        cache.add(
            &mut random,
            0,
            PAGES * page_size * row_bytes,
            &[(0, KvLayout::rows(PAGES, page_size, row_bytes))],
        );
    }
    let row = |bytes: &[u8], plane: usize, slot: usize| {
        let bytes = &bytes[cache.planes[plane].0 + slot * row_bytes..][..row_bytes];
        bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect::<Vec<_>>()
    };
    let mut on_cpu = KvCache::new(shape, PAGES).unwrap();
    for slot in 0..PAGES * page_size {
        for layer in 0..2 {
            let [keys, values] = [0, 1].map(|of| row(&cache.bytes, 2 * layer + of, slot));
            on_cpu.write(layer, &[slot], &keys, &values).unwrap();
        }
    }
    let leases: Vec<_> = batch
        .tables
        .iter_mut()
        .zip(&batch.trees)
        .map(|(table, tree)| table.lease(tree.len()).unwrap())
        .collect();
    let device_bytes = cuda.upload(&cache.bytes).unwrap();
    let mut mover = cache.mover(&cuda, device_bytes.address(), 200).unwrap();
    let kept = || leases.iter().zip(&batch.verdicts).map(|(lease, v)| (lease.table(), v.commit_plan()));
    mover.commit(kept()).unwrap();
    kept().for_each(|(table, plan)| on_cpu.commit(table, plan).unwrap());
    let bytes = outcome(cuda.download(&device_bytes)).unwrap();
    assert!(bytes != cache.bytes);
    for slot in 0..PAGES * page_size {
        let mut in_row = Vec::new();
        on_cpu.read_row(slot, &mut in_row).unwrap();
        let on_device = (0..4).flat_map(|plane| row(&bytes, plane, slot));
        assert!(on_device.map(f32::to_bits).eq(in_row.into_iter().map(f32::to_bits)), "slot {slot}");
    }
}

/// A step that keeps rows where they are queues nothing; the control moves one.
#[test]
fn nothing_to_move_is_no_launch() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(1));
    let cuda = device();
    let pool = PagePool::new(16, 8).unwrap();
    let mut cache = Cache::new(16, 8);
    // 5 chunks of 32 units: 40 columns of 16 bytes, 32 of one, and 33.
    for (width, offset) in [(640, 0), (32, 1), (33, 0)] {
        let layout = KvLayout::rows(8, 16, width);
        cache.add(&mut Random::new(1), offset, 8 * 16 * width, &[(0, layout)]);
    }
    let device_bytes = cuda.upload(&cache.bytes).unwrap();
    let mut mover = cache.mover(&cuda, device_bytes.address(), 4).unwrap();
    let chain = DraftTree::from_drafts(TokenId(0), &[(0, TokenId(1)), (1, TokenId(2))]).unwrap();
    let star = DraftTree::from_drafts(TokenId(0), &[(0, TokenId(1)), (0, TokenId(2))]).unwrap();
    let mut table = pool.table();
    let lease = table.lease(3).unwrap();
    let whole = verdict(&chain, 0, chain.node(2).unwrap());
    let none = verdict(&chain, 0, NodeId::ROOT);
    let before = emulator::report().stats;
    mover.commit([(lease.table(), whole.commit_plan()), (lease.table(), none.commit_plan())]).unwrap();
    mover.commit([]).unwrap();
    mover.move_slots([[]; 3]).unwrap();
    cuda.synchronize().unwrap();
    assert_eq!(emulator::report().stats, before);
    let second = verdict(&star, 0, star.node(2).unwrap());
    mover.commit([(lease.table(), none.commit_plan()), (lease.table(), second.commit_plan())]).unwrap();
    cuda.synchronize().unwrap();
    let num_blocks = emulator::report().stats.num_blocks - before.num_blocks;
    assert_eq!(num_blocks, 2, "four chunks a block, for one request");
}

#[test]
fn misuse_of_a_mover_is_an_error_before_anything_is_queued() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(1));
    let cuda = device();
    let bytes = cuda.upload(&vec![7u8; 16 * 8 * 64]).unwrap();
    let good = KvLayout::rows(8, 16, 64);
    let new = |address: u64, layout: KvLayout, page_size: usize, max_moves: usize| {
        // SAFETY: the layouts that are within the buffer are the ones that moves are queued for.
        let planes = vec![unsafe { KvPlane::from_raw(address, layout) }];
        KvMover::new(&cuda, KvMoverConfig { planes, page_size, max_moves })
    };
    let at = bytes.address();
    for (result, why) in [
        (new(at, good, 0, 1), "page size: wanted 1..=2^31"),
        (new(at, good, 16, 0), "moves of a call"),
        (new(at, good, 16, 65_536), "moves of a call"),
        (new(at, good, 17, 1), "don't overlap"),
        (new(0, good, 16, 1), "an address"),
        (new(u64::MAX - 100, good, 16, 1), "an address"),
        (new(at, KvLayout::rows(0, 16, 64), 16, 1), "1..=2^31 pages"),
        (new(at, KvLayout::rows(1 << 32, 16, 64), 16, 1), "1..=2^31 pages"),
        (new(at, KvLayout::rows(8, 16, 0), 16, 1), "parts and bytes"),
        (new(at, KvLayout { num_parts: 0, ..good }, 16, 1), "parts and bytes"),
        (new(at, KvLayout { row_stride: 63, ..good }, 16, 1), "don't overlap"),
        (new(at, KvLayout { num_parts: 2, part_stride: 32, ..good }, 16, 1), "don't overlap"),
        (new(at, KvLayout { page_stride: usize::MAX, ..good }, 16, 1), "don't overlap"),
        (new(at, KvLayout::rows(8, usize::MAX, 64), 16, 1), "don't overlap"),
        (new(at, KvLayout::rows(1, 1, 1 << 35), 1, 1), "at most 67108864, seen 34359738368"),
        (new(at, KvLayout::heads(1, 1, usize::MAX, 64), 1, 1), "more than can be counted"),
        (KvMover::new(&cuda, KvMoverConfig { planes: vec![], page_size: 1, max_moves: 1 }), "KV planes"),
    ] {
        let error = result.unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(why), "{why}: {error}");
    }

    let mut mover = new(at, good, 16, 3).unwrap();
    let star: Vec<_> = (1..9).map(|token| (0, TokenId(token))).collect();
    let star = DraftTree::from_drafts(TokenId(0), &star).unwrap();
    let plan = |prefix| verdict(&star, prefix, star.node(8).unwrap());
    let (of_none, of_two) = (plan(0), plan(2));
    let [pool, others, wider] =
        [(16, 8), (8, 8), (16, 40)].map(|(size, pages)| PagePool::new(size, pages).unwrap());
    let (mut table, mut other, mut far, short) = (pool.table(), others.table(), wider.table(), pool.table());
    let (table, other) = (table.lease(9).unwrap(), other.lease(9).unwrap());
    far.lease(39 * 16).unwrap().commit(39 * 16).unwrap();
    let of_far = plan(39 * 16);
    let far = far.lease(9).unwrap();
    let before = emulator::report().stats;
    for (kept, why) in [
        ((other.table(), &of_none), "page size of a KV table: wanted 16, seen 8"),
        ((table.table(), &of_two), "as many as before the plan's, 2, seen 0"),
        ((&short, &of_none), "KV row to keep: wanted below the 0"),
        ((far.table(), &of_far), "KV slot: wanted below 128"),
    ] {
        let error = mover.commit([(kept.0, kept.1.commit_plan())]).unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(why), "{why}: {error}");
    }
    // A table that is there twice.
    let twice = [(table.table(), of_none.commit_plan()); 2];
    assert!(mover.commit(twice).unwrap_err().to_string().contains("one for each slot to overwrite"));
    let move_slots = |mover: &mut KvMover, requests: &[&[(usize, usize)]]| {
        let steps = |moves: &&[(usize, usize)]| {
            moves.iter().map(|(from, to)| SlotMove { from: *from, to: *to }).collect::<Vec<_>>()
        };
        mover.move_slots(requests.iter().map(steps))
    };
    for (requests, why) in [
        (&[&[(2, 1), (3, 1)][..]][..], "one for each slot to overwrite, seen 1"),
        (&[&[(2, 1)], &[(3, 1)]], "one for each slot to overwrite, seen 1"),
        (&[&[(3, 2), (2, 1)]], "slot 2 read after"),
        (&[&[(2, 1)], &[(3, 2)]], "slot 2 in two"),
        (&[&[(3, 2)], &[(2, 1)]], "slot 2 in two"),
        (&[&[(1, 0)], &[(3, 2), (5, 4), (7, 6)]], "moves of a call: wanted at most 3"),
        (&[&[(1, 128)]], "KV slot: wanted below 128, seen 128"),
        (&[&[(usize::MAX, 1)]], "KV slot"),
    ] {
        let error = move_slots(&mut mover, requests).unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(why), "{why}: {error}");
    }
    cuda.synchronize().unwrap();
    assert_eq!(emulator::report().stats, before, "nothing ran");
    // The controls: in order, of one row to two places, in place.
    move_slots(&mut mover, &[&[(2, 1), (3, 2), (3, 4)]]).unwrap();
    move_slots(&mut mover, &[&[(2, 2)], &[], &[(9, 8)]]).unwrap();
    cuda.synchronize().unwrap();
    assert_eq!(emulator::report().stats.num_blocks - before.num_blocks, 1 + 2);
}
