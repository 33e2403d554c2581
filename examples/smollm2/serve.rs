//! Serving: the same loop with and without eagle-verify.
//!
//! Both modes use the same forward pass, threads and KV code, and batch continuously: a request that has
//! finished makes room for the next prompt. Plain decoding doesn't touch a `Speculator`.
//!
//! Where the target is split over ranks, each of them runs this same code on its part: their passes meet in the
//! target's sums, their choices in a `VocabShard`, and nothing here depends on time, so that they stay in step.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::comm::VocabShard;
use eagle_verify::sampling::{ChoiceKey, Sampler, SamplingContext, SamplingParams};
use eagle_verify::{AcceptStats, PageTable, RequestId, RequestOptions, Speculator, TokenId, VerifyBatch};

use super::device::Device;
use super::model::{Pass, Target};
use super::tokenizer::END_OF_TURN;

/// Prompt tokens that go through the target together.
const PROMPT_CHUNK: usize = 64;

/// What a mode made of some prompts.
#[derive(Debug, Default)]
pub struct Run {
    /// Output tokens of each prompt, the end of turn included.
    pub outputs: Vec<Vec<TokenId>>,
    pub num_steps: usize,
    /// Everything: prompts and steps.
    pub total_time: Duration,
    pub step_time: Duration,
    /// The target's forward passes inside the steps.
    pub target_time: Duration,
    /// The draft model inside the steps.
    pub draft_time: Duration,
    pub stats: AcceptStats,
}

impl Run {
    pub fn num_tokens(&self) -> usize {
        self.outputs.iter().map(Vec::len).sum()
    }

    /// Adds a run over further prompts.
    pub fn merge(&mut self, other: Self) {
        self.outputs.extend(other.outputs);
        self.num_steps += other.num_steps;
        self.total_time += other.total_time;
        self.step_time += other.step_time;
        self.target_time += other.target_time;
        self.draft_time += other.draft_time;
        self.stats.merge(&other.stats);
    }
}

/// A request that is being served: the engine's side of it.
struct Active {
    /// Which prompt; also its id.
    index: usize,
    table: PageTable,
    /// The last output token, whose keys are not in the cache yet.
    last: TokenId,
}

/// How plain decoding chooses: from whole rows of logits, or from a rank's columns together with the other ranks.
pub enum Chooser {
    Whole(Cpu),
    Shard(Cpu, VocabShard),
}

impl Chooser {
    /// A token for each row of logits.
    fn choose(
        &mut self,
        sampler: &Sampler,
        logits: &[f32],
        contexts: &[SamplingContext<'_>],
    ) -> Result<Vec<TokenId>> {
        let rows = logits.chunks(logits.len() / contexts.len()).zip(contexts);
        let keys: Vec<ChoiceKey> = match self {
            Self::Whole(cpu) => {
                rows.map(|(row, context)| cpu.sample(sampler, row, *context)).collect::<Result<_, _>>()?
            }
            Self::Shard(cpu, shard) => {
                let (columns, vocab) = (shard.columns(), shard.vocab());
                let keys = rows.map(|(row, at)| cpu.sample_shard(sampler, row, columns.clone(), vocab, *at));
                let mut keys = keys.collect::<Result<Vec<_>, _>>()?;
                shard.combine(&mut keys)?;
                keys.into_iter().map(ChoiceKey::checked).collect::<Result<_, _>>()?
            }
        };
        Ok(keys.into_iter().map(ChoiceKey::token).collect())
    }
}

/// Where the token after a text is drawn.
fn context<'a>(prompt: &'a [TokenId], output: &'a [TokenId]) -> SamplingContext<'a> {
    let position = (prompt.len() + output.len()) as u32;
    SamplingContext { position, prompt, output, path: &[], allowed: None }
}

/// Decodes plainly.
pub fn plain(
    target: &mut Target,
    chooser: &mut Chooser,
    prompts: &[Vec<TokenId>],
    batch: usize,
    max_new: usize,
    sampling: &SamplingParams,
) -> Result<Run> {
    let started = Instant::now();
    let sampler = Sampler::new(sampling.clone())?;
    let mut run = Run { outputs: vec![Vec::new(); prompts.len()], ..Run::default() };
    let (mut next, mut active) = (0, Vec::<Active>::new());
    loop {
        while active.len() < batch && next < prompts.len() {
            let mut table = target.new_table();
            let mut last = TokenId(0);
            for chunk in prompts[next].chunks(PROMPT_CHUNK) {
                let lease = table.lease(chunk.len())?;
                let pass = Pass::prompt(lease.table(), lease.table().len(), chunk);
                let logits = target.forward(&pass)?.logits;
                last = chooser.choose(&sampler, logits, &[context(&prompts[next], &[])])?[0];
                lease.commit(chunk.len())?;
            }
            run.outputs[next].push(last);
            if last != END_OF_TURN && max_new > 1 {
                active.push(Active { index: next, table, last });
            }
            next += 1;
        }
        if active.is_empty() {
            break;
        }

        let step_started = Instant::now();
        let leases = active.iter_mut().map(|r| Ok((r.table.lease(1)?, r.last)));
        let leases = leases.collect::<Result<Vec<_>>>()?;
        let pass = Pass::decode(leases.iter().map(|(lease, token)| (lease.table(), *token)));
        let target_started = Instant::now();
        let answer = target.forward(&pass)?;
        run.target_time += target_started.elapsed();
        leases.into_iter().try_for_each(|(lease, _)| lease.commit(1))?;
        let contexts = active.iter().map(|r| context(&prompts[r.index], &run.outputs[r.index]));
        let contexts: Vec<_> = contexts.collect();
        let tokens = chooser.choose(&sampler, answer.logits, &contexts)?;
        for (request, token) in active.iter_mut().zip(tokens) {
            request.last = token;
            run.outputs[request.index].push(token);
        }
        active.retain(|r| r.last != END_OF_TURN && run.outputs[r.index].len() < max_new);
        run.step_time += step_started.elapsed();
        run.num_steps += 1;
    }
    run.total_time = started.elapsed();
    Ok(run)
}

/// Decodes speculatively: the loop that an engine writes around `propose` and `accept`. The end of turn stops
/// every request, beside what `options` say.
pub fn speculative<D: Device>(
    target: &mut Target,
    speculator: &mut Speculator<D>,
    prompts: &[Vec<TokenId>],
    batch: usize,
    options: &RequestOptions,
) -> Result<Run> {
    let started = Instant::now();
    let mut run = Run { outputs: vec![Vec::new(); prompts.len()], ..Run::default() };
    let (mut next, mut active) = (0, Vec::<Active>::new());
    let mut verify_batch = VerifyBatch::new();
    loop {
        while active.len() < batch && next < prompts.len() {
            let id = RequestId(next as u64);
            let stop_tokens = vec![END_OF_TURN];
            speculator.admit(id, RequestOptions { stop_tokens, ..options.clone() })?;
            let mut table = target.new_table();
            let mut first = None;
            let mut chunks = prompts[next].chunks(PROMPT_CHUNK).peekable();
            while let Some(chunk) = chunks.next() {
                let lease = table.lease(chunk.len())?;
                let answer = target.forward(&Pass::prompt(lease.table(), lease.table().len(), chunk))?;
                let features = speculator.backend().bring(answer.features)?;
                speculator.prefill(id, chunk, D::view(&features))?;
                if chunks.peek().is_none() {
                    let logits = speculator.backend().bring(answer.logits)?;
                    first = Some(speculator.begin(id, D::view(&logits))?);
                }
                lease.commit(chunk.len())?;
            }
            let first = first.with_context(|| format!("prompt {next} is empty"))?;
            match first.finished {
                None => active.push(Active { index: next, table, last: first.token }),
                Some(_) => run.outputs[next] = speculator.finish(id)?.tokens,
            }
            next += 1;
        }
        if active.is_empty() {
            break;
        }

        // One step: propose trees, run the target on all their nodes, accept what it confirms.
        let step_started = Instant::now();
        let drafted = speculator.times().draft;
        let ids: Vec<RequestId> = active.iter().map(|r| RequestId(r.index as u64)).collect();
        speculator.propose(&ids, &mut verify_batch)?;
        run.draft_time += speculator.times().draft - drafted;

        let entries = verify_batch.entries().iter();
        let leases =
            active.iter_mut().zip(entries).map(|(r, entry)| Ok(r.table.lease(entry.tree().len())?));
        let leases = leases.collect::<Result<Vec<_>>>()?;
        let pass = Pass::verify(&verify_batch, leases.iter().map(|lease| lease.table()));
        let target_started = Instant::now();
        let answer = target.forward(&pass)?;
        run.target_time += target_started.elapsed();

        let logits = speculator.backend().bring(answer.logits)?;
        let features = speculator.backend().bring(answer.features)?;
        let verdicts = speculator.accept(&verify_batch, D::view(&logits), D::view(&features))?;
        drop((logits, features)); // the target goes on with its own
        for (lease, verdict) in leases.into_iter().zip(verdicts) {
            let plan = verdict.commit_plan();
            target.commit(lease.table(), plan)?;
            lease.commit(plan.num_kept_rows())?;
        }
        let done: Vec<bool> = verdicts.iter().map(|verdict| verdict.finished.is_some()).collect();
        let mut done = done.into_iter();
        let mut finished = Vec::new();
        active.retain(|r| {
            let is_done = done.next().unwrap_or(false);
            is_done.then(|| finished.push(r.index));
            !is_done
        });
        for index in finished {
            let output = speculator.finish(RequestId(index as u64))?;
            run.outputs[index] = output.tokens;
            run.stats.merge(&output.stats);
        }
        run.step_time += step_started.elapsed();
        run.num_steps += 1;
    }
    run.total_time = started.elapsed();
    Ok(run)
}

/// The gap between the two largest logits at each output position, given the output: how near a tie
/// plain decoding was.
pub fn top_two_gaps(target: &mut Target, prompt: &[TokenId], output: &[TokenId]) -> Result<Vec<f32>> {
    let mut table = target.new_table();
    let mut gaps = Vec::new();
    let mut feed = |table: &mut PageTable, tokens: &[TokenId]| -> Result<f32> {
        let lease = table.lease(tokens.len())?;
        let logits = target.forward(&Pass::prompt(lease.table(), lease.table().len(), tokens))?.logits;
        lease.commit(tokens.len())?;
        let best = argmax(logits).0 as usize;
        let others = logits.iter().enumerate().filter(|(token, _)| *token != best);
        Ok(logits[best] - others.fold(f32::MIN, |second, (_, logit)| second.max(*logit)))
    };
    let mut gap = 0.0;
    for chunk in prompt.chunks(PROMPT_CHUNK) {
        gap = feed(&mut table, chunk)?;
    }
    gaps.push(gap);
    for token in &output[..output.len().saturating_sub(1)] {
        gaps.push(feed(&mut table, &[*token])?);
    }
    Ok(gaps)
}

/// The largest logit's token, the lowest id at ties.
pub fn argmax(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    TokenId(best as u32)
}
