//! The suite for a card: each part on any `Cuda`. A card runs it in full (`tests/gpu.rs`); the emulator rehearses a
//! little of every part (`tests/gpu_rehearsal.rs`), so that it works when there is a card.
#![allow(dead_code)] // each test crate uses its part

use std::sync::Barrier;
use std::time::Duration;

use eagle_verify::backend::cpu::{Cpu, PackedLinear};
use eagle_verify::backend::cuda::{
    Buffer, ChooseRow, Chooser, ChooserConfig, Cuda, DeviceSlice, DeviceSliceMut, KvLayout, KvMover,
    KvMoverConfig, KvPlane, Linear, SlotMove,
};
use eagle_verify::comm::{GroupConfig, WorldSize};
use eagle_verify::sampling::{Sampler, SamplingContext};
use eagle_verify::{Coupling, Element, RequestOptions};
use half::{bf16, f16};

use crate::collective::*;
use crate::draft::{Both, large, options, samplings, small};
use crate::toy::{self, Numbers};

/// How much is run.
#[derive(Clone, Copy, PartialEq)]
pub enum Extent {
    Card,
    Rehearsal,
}

impl Extent {
    fn pick<'a, T>(self, card: &'a [T], rehearsal: &'a [T]) -> &'a [T] {
        if self == Self::Card { card } else { rehearsal }
    }
}

/// All ranks on one device.
pub struct VirtualRanks<F>(pub F);

impl<F: Fn() -> Cuda + Sync> Machine for VirtualRanks<F> {
    type Backend = Cuda;
    type Buffer<T: bytemuck::Pod> = Buffer<T>;

    fn backend(&self, _: usize) -> Cuda {
        self.0()
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

/// Of a group whose ranks' blocks are all resident on the one device.
fn group_config(hidden: usize, max_rows: usize, algorithm: eagle_verify::comm::Algorithm) -> GroupConfig {
    GroupConfig {
        max_blocks: 8,
        time_limit: Duration::from_secs(2),
        ..config(hidden, max_rows, Some(algorithm))
    }
}

/// Every algorithm and epilogue against the specification; returns the calls.
pub fn collectives<F: Fn() -> Cuda + Sync>(machine: &VirtualRanks<F>, extent: Extent) -> usize {
    let mut turn = 0;
    for world in WORLDS {
        for &algorithm in algorithms(world) {
            for &hidden in extent.pick(&[64, 576, 2880, 7168], &[576]) {
                let mut calls = Vec::new();
                for &rows in extent.pick(&[1, 3, 8, 33], &[1, 3]) {
                    turn += 1;
                    let payload = Payload::<bf16>::random(world.get(), rows, hidden, turn as u64);
                    calls.push((payload, EPILOGUES[turn % EPILOGUES.len()]));
                }
                check_calls(machine, world, group_config(hidden, 33, algorithm), &calls);
            }
        }
    }
    turn
}

/// Calls of a group that every rank has captured, launched again and again.
pub fn group_graphs<F: Fn() -> Cuda + Sync>(machine: &VirtualRanks<F>, extent: Extent) {
    let (world, hidden) = (WorldSize::Four, 576);
    let launches = if extent == Extent::Card { 100 } else { 3 };
    let payload = Payload::<bf16>::random(world.get(), 5, hidden, 77);
    let want = specified(&payload, Epilogue::Sum);
    for &algorithm in algorithms(world) {
        let all_captured = Barrier::new(world.get());
        let config = group_config(hidden, 5, algorithm);
        let outcomes = on_all_ranks::<_, bf16, _>(machine, world, config, |rank, cuda, group| {
            let mut buffers: Buffers<VirtualRanks<F>, bf16> =
                Buffers::new(cuda, &payload, rank.index(), Epilogue::Sum);
            let captured = cuda.capture(|| buffers.call(group).and_then(|()| buffers.call(group)));
            all_captured.wait();
            let mut graph = captured.unwrap();
            for _ in 0..launches {
                // SAFETY: the buffers and the group live on, until the download has waited.
                unsafe { graph.launch() }.unwrap();
            }
            let outcome = buffers.outcome(cuda);
            group.check().unwrap();
            outcome
        });
        for outcome in outcomes {
            assert_eq!(outcome.difference(&want, hidden), None, "{algorithm:?}");
        }
    }
}

/// Tokens, with every kind of sampling, against the specification.
pub fn choices(cuda: &Cuda, extent: Extent) {
    let mut numbers = Numbers::new(5);
    for &vocab in extent.pick(&[8, 1000, 49_152, 163_840], &[8, 1000]) {
        let mut chooser = Chooser::<f32>::new(cuda, ChooserConfig::new(8, vocab)).unwrap();
        for round in 0..extent.pick(&[6], &[2])[0] {
            let logits: Vec<f32> = numbers.floats(7 * vocab).into_iter().map(|x| x * 8.0).collect();
            let samplers: Vec<Sampler> =
                samplings().into_iter().map(|params| Sampler::new(params).unwrap()).collect();
            let text = toy::prompt(40, round);
            let context = SamplingContext {
                position: 40 + round as u32,
                prompt: &text[..10],
                output: &text[10..],
                path: &text[3..6],
                allowed: None,
            };
            // Biases name tokens up to 8.
            let usable: Vec<bool> = samplers
                .iter()
                .map(|s| s.params().logit_bias.iter().all(|(t, _)| (t.0 as usize) < vocab))
                .collect();
            let samplers: Vec<&Sampler> =
                samplers.iter().zip(usable).filter(|(_, usable)| *usable).map(|(s, _)| s).collect();
            let rows: Vec<ChooseRow<'_>> =
                samplers.iter().map(|sampler| ChooseRow::new(sampler, context)).collect();
            let on_device = cuda.upload(&logits[..rows.len() * vocab]).unwrap();
            let keys = chooser.choose(on_device.slice(), &rows).unwrap();
            for ((key, sampler), logits) in keys.iter().zip(&samplers).zip(logits.chunks(vocab)) {
                assert_eq!(*key, sampler.choose(logits, context).unwrap(), "{vocab} {:?}", sampler.params());
            }
        }
    }
}

/// Trees and verdicts of batches, against the CPU backend.
pub fn drafts(cuda: &Cuda, extent: Extent) {
    for &batch in extent.pick(&[1, 3, 8, 33], &[3]) {
        let mut both = Both::new(cuda, small, batch, 400);
        for i in 0..batch {
            let budget = ([1, 2, 4, 8, 10][i % 5], 1 + i * 3 % 8, if i % 3 == 0 { 256 } else { 30 });
            both.admit([1, 15, 16, 17, 70][i % 5], options(budget, samplings()[0].clone()));
        }
        (0..extent.pick(&[4], &[2])[0]).for_each(|_| both.step());
        both.compare_kv();
    }
    if extent == Extent::Rehearsal {
        return;
    }
    let mut both = Both::new(cuda, large, 8, 9000);
    for (i, sampling) in samplings().into_iter().enumerate() {
        let coupling = Coupling { noise_scale: 0.5, ..Coupling::default() };
        let options = RequestOptions { coupling, ..options((4, 4, 40), sampling) };
        both.admit([300, 8192 + 15, 40][i % 3], options);
    }
    (0..4).for_each(|_| both.step());
    both.compare_kv();
    assert!(both.num_correct > 20, "{}", both.num_correct);
}

/// Linear layers against those of the CPU, alone and in graphs; and a row has the same bits alone and among others.
pub fn linear_layers(cuda: &Cuda, extent: Extent) {
    for &(outputs, inputs) in
        extent.pick(&[(576, 1728), (200, 576), (64, 4096), (1000, 8), (10_240, 7168)], &[(70, 328)])
    {
        linear_layer::<bf16>(cuda, outputs, inputs, extent);
        linear_layer::<f16>(cuda, outputs, inputs, extent);
    }
}

fn linear_layer<T: Element>(cuda: &Cuda, outputs: usize, inputs: usize, extent: Extent) {
    let mut numbers = Numbers::new((outputs * inputs) as u64);
    let weights: Vec<T> = (0..outputs * inputs).map(|_| T::from_f32(2.0 * numbers.next_f32())).collect();
    let mut linear = Linear::new(cuda, &weights, outputs, inputs).unwrap();
    let weights: Vec<f32> = weights.iter().map(|weight| weight.to_f32()).collect();
    let sizes: Vec<f32> = weights.iter().map(|weight| weight.abs()).collect();
    let cpu = Cpu::new().unwrap();
    let on_cpu = |weights: &[f32], x: &[f32]| {
        let mut y = vec![0.0; x.len() / inputs * outputs];
        PackedLinear::new(weights, outputs, inputs).unwrap().forward(&cpu, x, &mut y).unwrap();
        y
    };
    let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
    let mut first_row = None;
    let x = numbers.floats(70 * inputs);
    for &rows in extent.pick(&[1, 5, 8, 9, 17, 33, 64, 70], &[1, 9, 70]) {
        let x = &x[..rows * inputs];
        let (input, mut output) = (cuda.upload(x).unwrap(), cuda.alloc(rows * outputs).unwrap());
        linear.forward(input.slice(), output.slice_mut()).unwrap();
        let seen = cuda.download(&output).unwrap();
        // Two halves for each x, and what tensor cores may lose in a sum, whatever their order.
        let relative = 2f32.powi(-16) + inputs.div_ceil(16) as f32 * 2f32.powi(-22);
        let (want, sizes) =
            (on_cpu(&weights, x), on_cpu(&sizes, &x.iter().map(|x| x.abs()).collect::<Vec<_>>()));
        for ((seen, want), size) in seen.iter().zip(&want).zip(&sizes) {
            assert!(
                (seen - want).abs() <= relative * size,
                "{outputs} x {inputs}, {rows} rows: {seen}, not {want}"
            );
        }
        let first = first_row.get_or_insert_with(|| bits(&seen[..outputs])).clone();
        assert_eq!(bits(&seen[..outputs]), first, "{outputs} x {inputs}: the first of {rows} rows");

        let mut graph = cuda.capture(|| linear.forward(input.slice(), output.slice_mut())).unwrap();
        for _ in 0..2 {
            cuda.write(&mut output, &vec![f32::NAN; rows * outputs]).unwrap();
            // SAFETY: the layer and both buffers are alive until the download has waited.
            unsafe { graph.launch() }.unwrap();
            assert_eq!(bits(&cuda.download(&output).unwrap()), bits(&seen), "a graph");
        }
    }
}

/// KV rows moved within requests, in two layouts, against the bytes after moving one after the other.
pub fn kv_moves(cuda: &Cuda, extent: Extent) {
    const PAGE: usize = 16;
    let mut numbers = Numbers::new(6);
    let &(requests, row_bytes) = &extent.pick(&[(64, 4096), (8, 1152)], &[(3, 64)])[0];
    let num_pages = 4 * requests;
    let len = num_pages * PAGE * row_bytes;
    for layout in
        [KvLayout::rows(num_pages, PAGE, row_bytes), KvLayout::heads(num_pages, PAGE, 4, row_bytes / 4)]
    {
        let mut bytes: Vec<u8> =
            (0..len.div_ceil(8)).flat_map(|_| numbers.next_u64().to_le_bytes()).collect();
        let on_device = cuda.upload(&bytes).unwrap();
        // Paths through trees: nodes ascend, and move down.
        let moves: Vec<Vec<SlotMove>> = (0..requests)
            .map(|request| {
                let root = request * 4 * PAGE + 13;
                let mut node = root;
                (1..6)
                    .map(|depth| {
                        node += 1 + (numbers.next_u64() % 8) as usize;
                        SlotMove { from: node, to: root + depth }
                    })
                    .filter(|step| step.from != step.to)
                    .collect()
            })
            .collect();
        // SAFETY: the buffer has the layout's bytes, and outlives the mover's work.
        let plane = unsafe { KvPlane::from_raw(on_device.address(), layout) };
        let config = KvMoverConfig { planes: vec![plane], page_size: PAGE, max_moves: 5 * requests };
        let mut mover = KvMover::new(cuda, config).unwrap();
        mover.move_slots(moves.iter().map(|moves| moves.iter().copied())).unwrap();
        for step in moves.iter().flatten() {
            let place = |slot: usize, part: usize| {
                slot / PAGE * layout.page_stride + slot % PAGE * layout.row_stride + part * layout.part_stride
            };
            for part in 0..layout.num_parts {
                let from = place(step.from, part);
                bytes.copy_within(from..from + layout.part_bytes, place(step.to, part));
            }
        }
        assert!(cuda.download(&on_device).unwrap() == bytes, "{layout:?}");
    }
}

/// A part for one device.
pub type Part = fn(&Cuda, Extent);

pub const PARTS: [(&str, Part); 4] =
    [("linear layers", linear_layers), ("KV moves", kv_moves), ("choices", choices), ("drafts", drafts)];
