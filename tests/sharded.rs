//! Speculators that each have a shard of the vocabulary: the verdicts of whole rows, on every rank, on the CPU and on
//! the emulated GPU; and errors that all ranks hear of.

use std::ops::Range;
use std::time::{Duration, Instant};

use cuda_emulator as emulator;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::Cuda;
use eagle_verify::comm::{Rank, Rendezvous, VocabShard, VocabShardConfig, WorldSize};
use eagle_verify::sampling::{ChoiceKey, Sampler, SamplingContext, SamplingParams};
use eagle_verify::{
    BatchEntry, DraftBudget, Eagle3Checkpoint, Error, ErrorKind, FinishReason, NodeId, RequestId,
    RequestOptions, Result, Speculator, SpeculatorConfig, TargetShape, TokenId, VerifyBatch,
};

#[path = "common/backends.rs"]
mod backends;
#[path = "common/toy.rs"]
mod toy;

use backends::Device;
use toy::{HeadShape, Numbers};

const TARGET: TargetShape = TargetShape { hidden: 64, num_layers: 6, vocab: 70 };
const LIMIT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(200);

/// Uneven shards, that start and end within words of a mask and blocks of noise.
fn shards(world: WorldSize) -> Vec<Range<usize>> {
    let bounds: &[[usize; 2]] = match world {
        WorldSize::One => &[[0, 70]],
        WorldSize::Two => &[[0, 45], [45, 70]],
        _ => &[[3, 30], [0, 3], [69, 70], [30, 69]],
    };
    bounds.iter().map(|[start, end]| *start..*end).collect()
}

fn open<D: Device>(device: &D, max_requests: usize, shard: Option<VocabShard>) -> Speculator<D> {
    let shape = HeadShape {
        target: TARGET,
        intermediate: 96,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        draft_tokens: (0..70).filter(|id| id % 5 != 3).collect(),
    };
    let files = toy::random_head(&shape, 7);
    let head = Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), TARGET).unwrap();
    let table = Numbers::new(99).floats(TARGET.vocab * TARGET.hidden);
    let table = Some(device.embedding(&table, TARGET.hidden));
    let config = SpeculatorConfig { max_requests, max_len: 200 };
    match shard {
        None => Speculator::new(device.clone(), &head, table, config).unwrap(),
        Some(shard) => Speculator::new_sharded(device.clone(), &head, table, config, shard).unwrap(),
    }
}

/// Runs a life for each rank, on a thread of its own.
fn lives<D: Device, T: Send>(
    world: WorldSize,
    limit: Duration,
    life: impl Fn(Rank, Player<D>) -> T + Sync,
) -> Vec<T> {
    let rendezvous = Rendezvous::new(world, LIMIT);
    std::thread::scope(|scope| {
        let threads: Vec<_> = world
            .ranks()
            .map(|rank| {
                let (rendezvous, life) = (&rendezvous, &life);
                scope.spawn(move || {
                    let columns = shards(world)[rank.index()].clone();
                    let config = VocabShardConfig {
                        time_limit: limit,
                        ..VocabShardConfig::new(TARGET.vocab, columns)
                    };
                    let shard = VocabShard::join(rendezvous, rank, config).unwrap();
                    life(rank, Player::new(Some(shard)))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// An engine with a made-up target, of which it has some columns.
struct Player<D: Device> {
    device: D,
    speculator: Speculator<D>,
    columns: Range<usize>,
    batch: VerifyBatch,
    ids: Vec<RequestId>,
}

fn samplings() -> Vec<SamplingParams> {
    let base = SamplingParams { temperature: 0.8, seed: 5, ..SamplingParams::default() };
    let bias = vec![(TokenId(7), 3.0), (TokenId(48), -5.0), (TokenId(69), 2.0)];
    vec![
        SamplingParams::default(),
        base.clone(),
        SamplingParams { repetition_penalty: 1.6, frequency_penalty: 0.4, ..base.clone() },
        SamplingParams { temperature: 0.0, presence_penalty: 1.0, logit_bias: bias.clone(), ..base.clone() },
        SamplingParams { temperature: 1.3, frequency_penalty: 0.5, logit_bias: bias, ..base.clone() },
        SamplingParams { top_k: 3, top_p: 0.5, temperature: 0.0, ..base }, // no filters at temperature 0
    ]
}

/// A number that a text gives, whoever asks.
fn numbers(text: &[TokenId], salt: u64) -> Numbers {
    let mix = |hash: u64, token: &TokenId| Numbers::new(hash ^ u64::from(token.0 + 1)).next_u64();
    Numbers::new(text.iter().fold(salt, mix))
}

fn logits(text: &[TokenId]) -> Vec<f32> {
    // Some ties, also between shards.
    numbers(&text[text.len().saturating_sub(3)..], 1)
        .floats(TARGET.vocab)
        .iter()
        .map(|x| (x * 12.0).round() / 3.0)
        .collect()
}

fn features(text: &[TokenId], start: usize) -> Vec<f32> {
    (start..text.len())
        .flat_map(|i| numbers(&text[i.saturating_sub(3)..=i], 2).floats(3 * TARGET.hidden))
        .collect()
}

/// What may follow a token: nothing of the tokens from 40 on, or only those, or all but some.
fn clear_some(last: TokenId, mask: &mut [u32]) -> bool {
    let is_allowed = |token: u32| match last.0 % 4 {
        0 => token < 40,
        1 => token >= 40,
        2 => (token ^ last.0).count_ones().is_multiple_of(2),
        _ => true,
    };
    (0..70)
        .filter(|token| !is_allowed(*token))
        .for_each(|token| mask[token as usize / 32] &= !(1 << (token % 32)));
    last.0 % 4 != 3
}

impl<D: Device> Player<D> {
    fn new(shard: Option<VocabShard>) -> Self {
        let device = D::open();
        let columns = shard.as_ref().map_or(0..TARGET.vocab, VocabShard::columns);
        let speculator = open(&device, 8, shard);
        Self { device, speculator, columns, batch: VerifyBatch::new(), ids: Vec::new() }
    }

    /// This rank's columns of rows of logits.
    fn own(&self, rows: &[f32]) -> Vec<f32> {
        rows.chunks(TARGET.vocab).flat_map(|row| row[self.columns.clone()].to_vec()).collect()
    }

    fn admit(&mut self, sampling: SamplingParams, budget: DraftBudget, masked: bool) -> TokenId {
        let id = RequestId(self.ids.len() as u64);
        let prompt: Vec<TokenId> = (0..9).map(|i| TokenId((i * 31 + 7 * id.0 as u32) % 70)).collect();
        let options = RequestOptions { max_new_tokens: 60, budget, sampling, ..RequestOptions::default() };
        self.speculator.admit(id, options).unwrap();
        let rows = self.device.floats(&features(&prompt, 0));
        self.speculator.prefill(id, &prompt, D::view(&rows)).unwrap();
        let row = self.device.floats(&self.own(&logits(&prompt)));
        let mut mask = [u32::MAX; 3];
        clear_some(prompt[8], &mut mask);
        let first = match masked {
            true => self.speculator.begin_masked(id, D::view(&row), &mask),
            false => self.speculator.begin(id, D::view(&row)),
        };
        self.ids.push(id);
        first.unwrap().token
    }

    /// Logits and features of the batch; of every four nodes with children, three like one of them.
    fn forward(&self) -> (Vec<f32>, Vec<f32>) {
        let (mut all_logits, mut all_features) = (Vec::new(), Vec::new());
        for entry in self.batch.entries() {
            let committed = self.speculator.committed(entry.request()).unwrap();
            let tree = entry.tree();
            for node in tree.nodes() {
                let path = tree.ancestors(node).iter().skip(1).map(|i| tree.tokens()[i]);
                let text: Vec<TokenId> = committed.iter().copied().chain(path).collect();
                let mut row = logits(&text);
                let children: Vec<NodeId> = tree.children(node).collect();
                let pick = numbers(&text, 3).next_u64() as usize;
                if !children.is_empty() && !pick.is_multiple_of(4) {
                    row[tree.token(children[pick / 4 % children.len()]).0 as usize] += 30.0;
                }
                all_logits.extend(row);
                all_features.extend(features(&text, text.len() - 1));
            }
        }
        (all_logits, all_features)
    }

    fn accept(&mut self, rows: &[f32], features: &[f32], masked: bool) -> Result<Vec<String>> {
        let (rows, features) = (self.device.floats(&self.own(rows)), self.device.floats(features));
        let (rows, features) = (D::view(&rows), D::view(&features));
        let masks =
            |entry: &BatchEntry, node: NodeId, mask: &mut [u32]| clear_some(entry.tree().token(node), mask);
        let verdicts = match masked {
            true => self.speculator.accept_masked(&self.batch, rows, features, masks)?,
            false => self.speculator.accept(&self.batch, rows, features)?,
        };
        let describe = verdicts.iter().map(|verdict| {
            let end = match &verdict.finished {
                Some(FinishReason::Fault(error)) => error.to_string(),
                other => format!("{other:?}"),
            };
            format!("{:?} {:?} {:?} {end}", verdict.request, verdict.path, verdict.emitted)
        });
        let described = describe.collect();
        let is_done = |id: RequestId| verdicts.iter().any(|v| v.request == id && v.finished.is_some());
        self.ids.retain(|id| !is_done(*id));
        Ok(described)
    }

    fn step(&mut self, masked: bool) -> Result<Vec<String>> {
        self.speculator.propose(&self.ids, &mut self.batch)?;
        let (rows, features) = self.forward();
        self.accept(&rows, &features, masked)
    }

    /// A whole scenario: all kinds of sampling, trees of several shapes, masks, a NaN of one token, a row that is
    /// all negative infinity.
    fn play(&mut self, masked: bool) -> Vec<String> {
        let mut seen = Vec::new();
        for (i, sampling) in samplings().into_iter().enumerate() {
            let budget =
                [DraftBudget::new(3, 3, 12), DraftBudget::chain(3), Ok(DraftBudget::NONE)][i % 3].clone();
            seen.push(format!("{:?}", self.admit(sampling, budget.unwrap(), masked)));
        }
        for _ in 0..3 {
            seen.extend(self.step(masked).unwrap());
        }
        self.speculator.propose(&self.ids, &mut self.batch).unwrap();
        let (mut rows, features) = self.forward();
        let root = |i: usize| self.batch.entries()[i].rows().start * TARGET.vocab;
        let (first, second, third) = (root(0), root(1), root(2));
        rows[first + 69] = f32::NAN;
        rows[first + 31] = f32::NAN; // the first one is named
        rows[second..second + TARGET.vocab].fill(f32::NEG_INFINITY);
        rows[third + 2] = f32::INFINITY;
        seen.extend(self.accept(&rows, &features, masked).unwrap());
        seen.extend(self.step(masked).unwrap());
        seen
    }
}

fn verdicts_are_those_of_whole_rows<D: Device>(masks: &[bool], worlds: &[WorldSize]) {
    for &masked in masks {
        let want = Player::<D>::new(None).play(masked);
        let text = want.join("\n");
        assert!(text.contains("NaN at token 31") && text.contains("above negative infinity"), "{text}");
        for &world in worlds {
            for seen in lives(world, LIMIT, |_, mut player: Player<D>| player.play(masked)) {
                assert_eq!(seen, want, "{world:?}, masked: {masked}");
            }
        }
    }
}

#[test]
fn verdicts_are_those_of_whole_rows_on_the_cpu() {
    verdicts_are_those_of_whole_rows::<Cpu>(
        &[false, true],
        &[WorldSize::One, WorldSize::Two, WorldSize::Four],
    );
}

#[test]
fn verdicts_are_those_of_whole_rows_on_a_gpu() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config { max_resident_blocks: 4, ..emulator::Config::fast() });
    verdicts_are_those_of_whole_rows::<Cuda>(&[true], &[WorldSize::Two, WorldSize::Four]);
    verdicts_are_those_of_whole_rows::<Cuda>(&[false], &[WorldSize::One]);
    assert!(emulator::report().complaint().is_none());
}

/// Keys of all shards of a row, and three ways to get them wrong.
#[test]
fn controls_a_wrong_index_and_a_forgotten_shard_show() {
    let cpu = Cpu::with_threads(1).unwrap();
    let columns = shards(WorldSize::Four);
    let (mut by_local_index, mut local_noise, mut forgotten) = (0, 0, 0);
    for (i, sampling) in samplings().into_iter().cycle().take(300).enumerate() {
        let sampler = Sampler::new(sampling).unwrap();
        let text: Vec<TokenId> = (0..4).map(|k| TokenId((i * 13 + k * 29) as u32 % 70)).collect();
        let (prompt, output) = text.split_at(2);
        let context = SamplingContext { position: i as u32, prompt, output, path: &[], allowed: None };
        let row = logits(&text);
        let want = cpu.sample(&sampler, &row, context).unwrap();
        let key = |range: &Range<usize>| {
            cpu.sample_shard(&sampler, &row[range.clone()], range.clone(), 70, context).unwrap()
        };
        assert_eq!(columns.iter().map(key).max(), Some(want));
        let local = |range: &Range<usize>| {
            ChoiceKey::new(key(range).score(), TokenId(key(range).token().0 - range.start as u32))
        };
        by_local_index += usize::from(columns.iter().map(local).max() != Some(want));
        // A rank that takes its columns for the first ones.
        let moved = |range: &Range<usize>| {
            let key = cpu.sample_shard(&sampler, &row[range.clone()], 0..range.len(), 70, context).unwrap();
            ChoiceKey::new(key.score(), TokenId(key.token().0 + range.start as u32))
        };
        local_noise += usize::from(columns.iter().map(moved).max() != Some(want));
        forgotten += usize::from(columns[..3].iter().map(key).max() != Some(want));
    }
    assert!(
        by_local_index > 100 && local_noise > 100 && forgotten > 100,
        "{by_local_index} {local_noise} {forgotten}"
    );
    let filtered = Sampler::new(SamplingParams { temperature: 1.0, top_k: 2, ..Default::default() }).unwrap();
    let context = SamplingContext { position: 0, prompt: &[], output: &[], path: &[], allowed: None };
    let error = cpu.sample_shard(&filtered, &[0.0; 10], 5..15, 70, context).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let plain = Sampler::default();
    assert_eq!(
        cpu.sample_shard(&plain, &[0.0; 9], 5..15, 70, context).unwrap_err().subject(),
        "logits of a shard"
    );
    assert_eq!(cpu.sample_shard(&plain, &[0.0; 10], 65..75, 70, context).unwrap_err().subject(), "columns");
}

fn tree() -> DraftBudget {
    DraftBudget::new(3, 3, 12).unwrap()
}

/// A call that one rank gets wrong fails on all, changes nothing on any, and can be made again.
#[test]
fn what_fails_on_one_rank_fails_on_all_and_can_be_repeated() {
    let mut alone = Player::<Cpu>::new(None);
    alone.admit(samplings().remove(1), tree(), false);
    let want = alone.step(false).unwrap();
    let seen = lives(WorldSize::Four, LIMIT, |rank, mut player: Player<Cpu>| {
        player.admit(samplings().remove(1), tree(), false);
        player.speculator.propose(&player.ids, &mut player.batch).unwrap();
        let (rows, features) = player.forward();
        let batch = player.batch.clone();
        let own = player.own(&rows);
        let wrong = if rank.index() == 2 { &own[1..] } else { &own[..] };
        let first = player.speculator.accept(&batch, wrong, &features).unwrap_err();
        assert_eq!(first.kind(), ErrorKind::Misuse);
        let place = if rank.index() == 2 { "logits of the batch" } else { "logits of the batch of rank 2" };
        assert_eq!(first.subject(), place);
        player.accept(&rows, &features, false).unwrap()
    });
    assert!(seen.iter().all(|seen| *seen == want), "{seen:?}");
}

/// Each life after a first token; the errors of the ranks that have one, within the time.
fn errors(limit: Duration, life: impl Fn(usize, Player<Cpu>) -> Option<Error> + Sync) -> Vec<Error> {
    let started = Instant::now();
    let errors = lives(WorldSize::Four, limit, |rank, mut player: Player<Cpu>| {
        player.admit(samplings().remove(1), tree(), false);
        life(rank.index(), player)
    });
    assert!(started.elapsed() < Duration::from_secs(20));
    errors.into_iter().flatten().collect()
}

#[test]
fn lost_ranks_and_other_drafts_are_named() {
    // One that never comes: its speculator is there, but makes no call.
    let done = std::sync::Barrier::new(4);
    let seen = errors(SHORT, |rank, mut player| {
        let error = (rank != 1).then(|| player.step(false).unwrap_err());
        let committed = player.speculator.committed(RequestId(0)).unwrap().len();
        assert_eq!(committed, 10, "nothing has changed");
        done.wait();
        error
    });
    assert!(seen.len() == 3 && seen.iter().all(|e| e.to_string().contains("no sign of rank 1")), "{seen:?}");
    // One that gives up.
    let seen = errors(LIMIT, |rank, mut player| (rank != 1).then(|| player.step(false).unwrap_err()));
    assert!(seen.len() == 3 && seen.iter().all(|e| e.to_string().contains("rank 1 gone")), "{seen:?}");
    // One that drafts another number of nodes, and one that drafts others.
    let budgets = [DraftBudget::new(3, 3, 11), DraftBudget::new(2, 3, 12)];
    for (budget, part) in budgets.into_iter().zip(["keys of 11 rows", "keys of 12 rows"]) {
        let seen = errors(LIMIT, |rank, mut player| {
            if rank == 3 {
                player.speculator.set_budget(RequestId(0), budget.clone().unwrap()).unwrap();
            }
            Some(player.step(false).unwrap_err())
        });
        assert_eq!(seen.len(), 4);
        for error in seen {
            assert_eq!((error.kind(), error.subject()), (ErrorKind::Misuse, "call of the vocabulary shards"));
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}

#[test]
fn decisions_are_those_of_rank_0() {
    let seen = lives(WorldSize::Four, LIMIT, |rank, mut player: Player<Cpu>| {
        player.admit(samplings().remove(0), DraftBudget::NONE, false);
        let mut nodes = [4 + rank.index() as u64];
        player.speculator.broadcast(&mut nodes).unwrap();
        let budget = DraftBudget::new(2, 3, nodes[0] as usize).unwrap();
        player.speculator.set_budget(RequestId(0), budget).unwrap();
        player.step(false).unwrap();
        player.batch.num_rows()
    });
    assert_eq!(seen, [4; 4]);
    let mut values = [5];
    Player::<Cpu>::new(None).speculator.broadcast(&mut values).unwrap();
    assert_eq!(values, [5]);
}

#[test]
fn what_needs_whole_rows_is_refused_at_admission() {
    let filters: [fn(&mut SamplingParams); 3] = [|p| p.top_k = 5, |p| p.top_p = 0.9, |p| p.min_p = 0.1];
    lives(WorldSize::Two, LIMIT, |_, mut player: Player<Cpu>| {
        let mut refused = |options: RequestOptions| {
            let error = player.speculator.admit(RequestId(9), options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        };
        for change in filters {
            let mut sampling = SamplingParams { temperature: 0.5, ..Default::default() };
            change(&mut sampling);
            refused(RequestOptions { sampling, ..Default::default() });
        }
        refused(RequestOptions { log_probs: Some(0), ..Default::default() });
    });
    // A shard of another vocabulary.
    let config = VocabShardConfig::new(71, 0..71);
    let rendezvous = Rendezvous::new(WorldSize::One, LIMIT);
    let rank = Rank::new(0, WorldSize::One).unwrap();
    let shard = VocabShard::join(&rendezvous, rank, config).unwrap();
    let files = toy::head_files(7);
    let head =
        Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), toy::TARGET).unwrap();
    let config = SpeculatorConfig { max_requests: 1, max_len: 9 };
    let error = Speculator::new_sharded(Cpu::open(), &head, None, config, shard).unwrap_err();
    assert_eq!(error.subject(), "vocabulary of the shard");
}
