//! The axioms of the PTX memory model (generic proxy), by brute force, for very small programs: every choice
//! of which write each read reads, of each location's coherence order and of the order of the sc fences is
//! tried. Written from the published model, and from nothing in the emulator.

use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Gpu,
    Sys,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Weak,
    Relaxed,
    Acquire,
    Release,
    Sc,
}

#[derive(Clone, Copy)]
enum Action {
    Write { location: usize, value: u32 },
    Read { location: usize, register: usize },
    Fence,
    Barrier { id: usize },
}

#[derive(Clone, Copy)]
pub struct Op {
    action: Action,
    order: Order,
    scope: Scope,
}

/// Where a thread runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub block: u32,
    pub device: u32,
}

const fn op(action: Action, order: Order, scope: Scope) -> Op {
    Op { action, order, scope }
}
pub fn write(location: usize) -> Op {
    op(Action::Write { location, value: 1 }, Order::Relaxed, Scope::Sys)
}
pub fn write_weak(location: usize) -> Op {
    op(Action::Write { location, value: 1 }, Order::Weak, Scope::Sys)
}
pub fn release(location: usize) -> Op {
    op(Action::Write { location, value: 1 }, Order::Release, Scope::Sys)
}
pub fn release_gpu(location: usize) -> Op {
    op(Action::Write { location, value: 1 }, Order::Release, Scope::Gpu)
}
pub fn read(location: usize, register: usize) -> Op {
    op(Action::Read { location, register }, Order::Relaxed, Scope::Sys)
}
pub fn read_weak(location: usize, register: usize) -> Op {
    op(Action::Read { location, register }, Order::Weak, Scope::Sys)
}
pub fn acquire(location: usize, register: usize) -> Op {
    op(Action::Read { location, register }, Order::Acquire, Scope::Sys)
}
pub fn fence_sc() -> Op {
    op(Action::Fence, Order::Sc, Scope::Sys)
}
pub fn barrier(id: usize) -> Op {
    op(Action::Barrier { id }, Order::Weak, Scope::Sys)
}

type Relation = BTreeSet<(usize, usize)>;

fn compose(a: &Relation, b: &Relation) -> Relation {
    a.iter().flat_map(|&(x, y)| b.range((y, 0)..=(y, usize::MAX)).map(move |&(_, z)| (x, z))).collect()
}
fn union(relations: &[&Relation]) -> Relation {
    relations.iter().flat_map(|r| r.iter().copied()).collect()
}
fn intersect(a: &Relation, b: &Relation) -> Relation {
    a.intersection(b).copied().collect()
}
fn closure(relation: &Relation) -> Relation {
    let mut closed = relation.clone();
    loop {
        let larger = union(&[&closed, &compose(&closed, &closed)]);
        if larger.len() == closed.len() {
            return closed;
        }
        closed = larger;
    }
}
fn is_irreflexive(relation: &Relation) -> bool {
    relation.iter().all(|(a, b)| a != b)
}
fn is_acyclic(relation: &Relation) -> bool {
    is_irreflexive(&closure(relation))
}
fn product<T: Clone>(choices: &[Vec<T>]) -> Vec<Vec<T>> {
    choices.iter().fold(vec![vec![]], |partial, choice| {
        let extend = |done: &Vec<T>| -> Vec<Vec<T>> {
            choice.iter().map(|next| done.iter().chain([next]).cloned().collect()).collect()
        };
        partial.iter().flat_map(extend).collect()
    })
}
fn permutations(items: &[usize]) -> Vec<Vec<usize>> {
    if items.is_empty() {
        return vec![vec![]];
    }
    let start_with = |&first: &usize| {
        let rest: Vec<_> = items.iter().copied().filter(|&item| item != first).collect();
        permutations(&rest).into_iter().map(move |tail| [vec![first], tail].concat()).collect::<Vec<_>>()
    };
    items.iter().flat_map(start_with).collect()
}

/// An operation, or the write that initialises a location (`thread` is none).
struct Event {
    thread: Option<usize>,
    op: Op,
}

struct Program<'a> {
    events: Vec<Event>,
    places: &'a [Place],
    program_order: Relation,
}

impl Program<'_> {
    fn location(&self, e: usize) -> Option<usize> {
        match self.events[e].op.action {
            Action::Write { location, .. } | Action::Read { location, .. } => Some(location),
            Action::Fence | Action::Barrier { .. } => None,
        }
    }
    fn is_write(&self, e: usize) -> bool {
        matches!(self.events[e].op.action, Action::Write { .. })
    }
    fn is_read(&self, e: usize) -> bool {
        matches!(self.events[e].op.action, Action::Read { .. })
    }
    fn has_order(&self, e: usize, order: Order) -> bool {
        self.events[e].op.order == order
    }
    fn is_strong(&self, e: usize) -> bool {
        !self.has_order(e, Order::Weak)
    }
    fn is_in_scope_of(&self, e: usize, other: usize) -> bool {
        let (Some(a), Some(b)) = (self.events[e].thread, self.events[other].thread) else { return true };
        self.events[e].op.scope == Scope::Sys || self.places[a].device == self.places[b].device
    }
    fn is_morally_strong(&self, a: usize, b: usize) -> bool {
        let is_ordered = self.program_order.contains(&(a, b)) || self.program_order.contains(&(b, a));
        let is_strong =
            self.is_strong(a) && self.is_strong(b) && self.is_in_scope_of(a, b) && self.is_in_scope_of(b, a);
        let is_same_location = match (self.location(a), self.location(b)) {
            (Some(x), Some(y)) => x == y,
            _ => true,
        };
        a != b && (is_ordered || is_strong) && is_same_location
    }
    fn relation(&self, holds: impl Fn(usize, usize) -> bool) -> Relation {
        let n = self.events.len();
        (0..n).flat_map(|a| (0..n).map(move |b| (a, b))).filter(|&(a, b)| holds(a, b)).collect()
    }
    fn select(&self, holds: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.events.len()).filter(|&e| holds(e)).collect()
    }
}

fn build<'a>(threads: &[Vec<Op>], places: &'a [Place]) -> Program<'a> {
    let location = |op: &Op| match op.action {
        Action::Write { location, .. } | Action::Read { location, .. } => Some(location),
        _ => None,
    };
    let locations: BTreeSet<usize> = threads.iter().flatten().filter_map(location).collect();
    let mut events: Vec<Event> = locations
        .iter()
        .map(|&location| Event {
            thread: None,
            op: op(Action::Write { location, value: 0 }, Order::Weak, Scope::Sys),
        })
        .collect();
    for (thread, ops) in threads.iter().enumerate() {
        events.extend(ops.iter().map(|&op| Event { thread: Some(thread), op }));
    }
    let mut program = Program { events, places, program_order: Relation::new() };
    program.program_order =
        program.relation(|a, b| match (program.events[a].thread, program.events[b].thread) {
            (None, Some(_)) => true,
            (Some(s), Some(t)) => s == t && a < b,
            _ => false,
        });
    program
}

/// Whether the axioms allow all these registers to have these values at the end.
pub fn is_allowed(threads: &[Vec<Op>], places: &[Place], outcome: &[(usize, u32)]) -> bool {
    let p = build(threads, places);
    let n = p.events.len();
    let identity: Relation = (0..n).map(|e| (e, e)).collect();
    let morally_strong = p.relation(|a, b| p.is_morally_strong(a, b));
    let is_memory = |e: usize| p.location(e).is_some();
    let same_location: Relation = p
        .program_order
        .iter()
        .copied()
        .filter(|&(a, b)| is_memory(a) && p.location(a) == p.location(b))
        .collect();
    let is_fence = |e: usize| matches!(p.events[e].op.action, Action::Fence);
    let (reads, writes) = (p.select(|e| p.is_read(e)), p.select(|e| p.is_write(e)));
    let release_pattern = p.relation(|a, b| {
        p.is_write(b)
            && p.is_strong(b)
            && ((p.has_order(a, Order::Release) && (a == b || same_location.contains(&(a, b))))
                || (is_fence(a) && p.program_order.contains(&(a, b))))
    });
    let acquire_pattern = p.relation(|a, b| {
        p.is_read(a)
            && p.is_strong(a)
            && ((p.has_order(b, Order::Acquire) && (a == b || same_location.contains(&(a, b))))
                || (is_fence(b) && p.program_order.contains(&(a, b))))
    });
    let barriers = p.relation(|a, b| match (p.events[a].op.action, p.events[b].op.action) {
        (Action::Barrier { id: x }, Action::Barrier { id: y }) => a != b && x == y,
        _ => false,
    });
    let sc_fences = p.select(|e| is_fence(e) && p.has_order(e, Order::Sc));
    let program_order_or_same = union(&[&p.program_order, &identity]);

    let sources: Vec<Vec<usize>> = reads
        .iter()
        .map(|&r| writes.iter().copied().filter(|&w| p.location(w) == p.location(r)).collect())
        .collect();
    let locations: BTreeSet<usize> = writes.iter().filter_map(|&w| p.location(w)).collect();
    let coherence_orders: Vec<Vec<Vec<usize>>> = locations
        .iter()
        .map(|&location| {
            let here = |is_initial: bool| {
                let of = |&w: &usize| {
                    p.location(w) == Some(location) && p.events[w].thread.is_none() == is_initial
                };
                writes.iter().copied().filter(of).collect::<Vec<_>>()
            };
            permutations(&here(false)).into_iter().map(|order| [here(true), order].concat()).collect()
        })
        .collect();

    for choice in product(&sources) {
        let gives_outcome = reads.iter().zip(&choice).all(|(&r, &w)| {
            let (Action::Read { register, .. }, Action::Write { value, .. }) =
                (p.events[r].op.action, p.events[w].op.action)
            else {
                unreachable!("reads read writes")
            };
            outcome.iter().all(|&(wanted, wanted_value)| wanted != register || wanted_value == value)
        });
        if !gives_outcome {
            continue;
        }
        let reads_from: Relation = choice.iter().copied().zip(reads.iter().copied()).collect();
        let observation = intersect(&morally_strong, &reads_from);
        let synchronizes = intersect(
            &compose(&compose(&release_pattern, &closure(&observation)), &acquire_pattern),
            &morally_strong,
        );
        for orders in product(&coherence_orders) {
            let pairs = |order: &Vec<usize>| -> Vec<(usize, usize)> {
                (0..order.len())
                    .flat_map(|i| (0..i).map(move |j| (j, i)))
                    .map(|(j, i)| (order[j], order[i]))
                    .collect()
            };
            let coherence: Relation = orders.iter().flat_map(pairs).collect();
            let from_reads: Relation = reads
                .iter()
                .zip(&choice)
                .flat_map(|(&r, &w)| coherence.range((w, 0)..=(w, n)).map(move |&(_, later)| (r, later)))
                .collect();
            for fence_order in permutations(&sc_fences) {
                let fences: Relation = fence_order
                    .iter()
                    .enumerate()
                    .flat_map(|(i, &a)| fence_order[i + 1..].iter().map(move |&b| (a, b)))
                    .filter(|pair| morally_strong.contains(pair))
                    .collect();
                let hops = compose(&union(&[&synchronizes, &fences, &barriers]), &program_order_or_same);
                let base = union(&[&p.program_order, &compose(&program_order_or_same, &closure(&hops))]);
                let causality = union(&[&base, &compose(&observation, &base)]);
                let is_coherent = causality.iter().all(|&(a, b)| {
                    let are_writes = p.is_write(a) && p.is_write(b) && p.location(a) == p.location(b);
                    !are_writes || coherence.contains(&(a, b))
                });
                let communication = union(&[&reads_from, &coherence, &from_reads]);
                let is_sequential = causality.iter().all(|&(a, b)| {
                    let are_fences = sc_fences.contains(&a) && sc_fences.contains(&b);
                    !are_fences || !morally_strong.contains(&(a, b)) || fences.contains(&(a, b))
                });
                let has_sc_per_location =
                    is_acyclic(&union(&[&intersect(&morally_strong, &communication), &same_location]));
                let is_causal = is_irreflexive(&compose(&union(&[&reads_from, &from_reads]), &causality));
                if is_coherent && is_sequential && has_sc_per_location && is_causal && is_acyclic(&reads_from)
                {
                    return true;
                }
            }
        }
    }
    false
}
