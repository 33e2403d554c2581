//! Laws of the pure modules, for any tree: their invariants, masks, walks, batches and KV plans.

use std::collections::BTreeSet;

use eagle_verify::{
    AcceptStats, DraftTree, FinishReason, NodeId, OutputLimits, PagePool, PageTable, RequestId, TokenId,
    Verdict, VerifyBatch,
};
use proptest::prelude::*;

mod common;
use common::toy::Numbers;

const VOCAB: u64 = 300;

/// Any tree of up to 256 nodes: paths, stars, and everything between.
fn any_tree() -> impl Strategy<Value = DraftTree> {
    let size = prop_oneof![3 => 1usize..20, 2 => 20usize..200, 1 => prop::sample::select(vec![1, 2, 63, 64, 65, 128, 255, 256])];
    (size, 0u8..4, any::<u64>()).prop_map(|(size, shape, seed)| {
        let mut numbers = Numbers::new(seed);
        let mut tree = DraftTree::new(TokenId((numbers.next_u64() % VOCAB) as u32));
        while tree.len() < size {
            let last = tree.len() - 1;
            let parent = match shape {
                0 => last,
                1 => 0,
                2 => last - (numbers.next_u64() as usize % 4).min(last),
                _ => numbers.next_u64() as usize % tree.len(),
            };
            let token = TokenId((numbers.next_u64() % VOCAB) as u32);
            // A sibling with this token may exist already: then nothing is added.
            let _ = tree.push(tree.node(parent).unwrap(), token);
        }
        tree
    })
}

/// The path from the root to a node, by parents alone.
fn path_to(tree: &DraftTree, node: NodeId) -> Vec<NodeId> {
    let mut path = vec![node];
    while let Some(parent) = tree.parent(path[path.len() - 1]) {
        path.push(parent);
    }
    path.reverse();
    path
}

/// A target that answers each node with a token that is often, not always, one of its children's.
fn answer(tree: &DraftTree, node: NodeId, seed: u64) -> TokenId {
    let mut numbers = Numbers::new(seed ^ ((node.index() as u64) << 32));
    let children: Vec<NodeId> = tree.children(node).collect();
    match children.len() {
        0 => TokenId((numbers.next_u64() % VOCAB) as u32),
        _ if numbers.next_u64().is_multiple_of(4) => TokenId((numbers.next_u64() % VOCAB) as u32),
        count => tree.token(children[numbers.next_u64() as usize % count]),
    }
}

/// By brute force: of all root-to-leaf paths the longest whose tokens are all the target's.
fn best_path(tree: &DraftTree, target: impl Fn(NodeId) -> TokenId) -> Vec<NodeId> {
    let leaves = tree.nodes().filter(|node| tree.children(*node).next().is_none());
    let agreed = leaves.map(|leaf| {
        let path = path_to(tree, leaf);
        let correct = path.windows(2).take_while(|pair| tree.token(pair[1]) == target(pair[0])).count();
        path[..=correct].to_vec()
    });
    agreed.max_by_key(Vec::len).unwrap()
}

const NO_LIMIT: OutputLimits<'_> = OutputLimits { stop_tokens: &[], num_remaining: usize::MAX };

fn batch_of(trees: &[DraftTree]) -> VerifyBatch {
    let mut batch = VerifyBatch::new();
    for (i, tree) in trees.iter().enumerate() {
        batch.push(RequestId(i as u64), 1 + 37 * i, tree).unwrap();
    }
    batch
}

fn walk(tree: &DraftTree, limits: OutputLimits<'_>, target: impl Fn(NodeId) -> TokenId) -> Verdict {
    let mut verdict = Verdict::new();
    verdict.walk(&batch_of(std::slice::from_ref(tree)).entries()[0], limits, |node| Ok(target(node)));
    verdict
}

proptest! {
    #[test]
    fn trees_keep_their_invariants(tree in any_tree()) {
        prop_assert!((1..=256).contains(&tree.len()));
        prop_assert_eq!(tree.parent(NodeId::ROOT), None);
        for node in tree.nodes() {
            let path = path_to(&tree, node);
            prop_assert_eq!(tree.depth(node), path.len() - 1);
            prop_assert!(path.windows(2).all(|pair| pair[0] < pair[1]), "parents precede children");
            let ancestors: Vec<usize> = tree.ancestors(node).iter().collect();
            prop_assert_eq!(ancestors, path.iter().map(|n| n.index()).collect::<Vec<_>>());
            let children: Vec<NodeId> = tree.children(node).collect();
            let by_parents: Vec<NodeId> = tree.nodes().filter(|n| tree.parent(*n) == Some(node)).collect();
            prop_assert_eq!(&children, &by_parents);
            for (rank, child) in children.iter().enumerate() {
                prop_assert_eq!(tree.child_with(node, tree.token(*child)), Some((*child, rank)));
            }
        }
        // Built again from its drafts, or in the memory of another, it is the same tree.
        let drafts: Vec<_> = tree.nodes().skip(1).map(|n| (tree.parent(n).unwrap().index(), tree.token(n))).collect();
        prop_assert_eq!(&DraftTree::from_drafts(tree.tokens()[0], &drafts).unwrap(), &tree);
        let mut reused = tree.clone();
        reused.reset(tree.tokens()[0]);
        for (parent, token) in drafts {
            reused.push(reused.node(parent).unwrap(), token).unwrap();
        }
        prop_assert_eq!(reused, tree);
    }

    #[test]
    fn all_masks_are_the_ancestor_relation(tree in any_tree(), prefix in 0usize..70) {
        let n = tree.len();
        let sees = |row: usize, column: usize| {
            column < prefix || path_to(&tree, tree.node(row).unwrap()).iter().any(|a| a.index() + prefix == column)
        };
        let (mut dense, mut additive, mut bits, mut words) = (Vec::new(), Vec::new(), vec![0xff], Vec::new());
        tree.mask_dense(prefix, &mut dense);
        tree.mask_additive(prefix, &mut additive);
        tree.mask_bits(prefix, &mut bits); // after what is there already
        tree.mask_words(&mut words);
        prop_assert_eq!(dense.len(), n * (prefix + n));
        prop_assert_eq!(additive.len(), dense.len());
        prop_assert_eq!(bits.len(), 1 + dense.len().div_ceil(8));
        prop_assert_eq!(words.len(), n * n.div_ceil(32) * 2);
        for row in 0..n {
            for column in 0..prefix + n {
                let (at, want) = (row * (prefix + n) + column, sees(row, column));
                prop_assert_eq!(dense[at], want);
                prop_assert_eq!(additive[at], if want { 0.0 } else { f32::NEG_INFINITY });
                prop_assert_eq!(bits[1 + at / 8] >> (at % 8) & 1 == 1, want);
            }
            for column in 0..n.div_ceil(32) * 32 {
                let word = words[row * n.div_ceil(32) * 2 + column / 16];
                prop_assert_eq!(word >> (column % 16) & 1 == 1, column < n && sees(row, prefix + column));
            }
        }
        let spare = bits.len() * 8 - 8 - dense.len();
        prop_assert_eq!(bits[bits.len() - 1].leading_zeros() as usize >= spare, true, "padding is zero");
    }

    #[test]
    fn the_walk_is_the_best_path(tree in any_tree(), seed in any::<u64>()) {
        let target = |node| answer(&tree, node, seed);
        let path = best_path(&tree, target);
        let verdict = walk(&tree, NO_LIMIT, target);
        prop_assert_eq!(&verdict.path, &path);
        prop_assert_eq!(&verdict.emitted, &path.iter().map(|n| target(*n)).collect::<Vec<_>>());
        prop_assert_eq!(verdict.num_correct_drafts(), path.len() - 1);
        prop_assert!(verdict.finished.is_none());
    }

    #[test]
    fn limits_cut_the_walk_and_nothing_else(tree in any_tree(), seed in any::<u64>(), limit in 1usize..6, stop in 0u64..VOCAB) {
        let target = |node| answer(&tree, node, seed);
        let whole = walk(&tree, NO_LIMIT, target);
        let stop_tokens = [TokenId(stop as u32), whole.emitted[whole.emitted.len() / 2]];
        let limits = OutputLimits { stop_tokens: &stop_tokens, num_remaining: limit };
        let cut = walk(&tree, limits, target);
        let stopped = whole.emitted.iter().position(|t| stop_tokens.contains(t)).map(|place| place + 1);
        let len = stopped.unwrap_or(usize::MAX).min(limit).min(whole.emitted.len());
        prop_assert_eq!(&cut.emitted[..], &whole.emitted[..len]);
        prop_assert_eq!(cut.path.len(), len);
        match cut.finished {
            Some(FinishReason::Stop(token)) => prop_assert!(stopped == Some(len) && token == cut.emitted[len - 1]),
            Some(FinishReason::Length) => prop_assert_eq!(len, limit),
            None => prop_assert!(stopped.is_none() && len < limit),
            other => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn a_batch_is_its_trees_one_after_the_other(trees in prop::collection::vec(any_tree(), 0..6)) {
        let batch = batch_of(&trees);
        prop_assert_eq!(batch.entries().len(), trees.len());
        let mut row = 0;
        for (i, tree) in trees.iter().enumerate() {
            let entry = &batch.entries()[i];
            prop_assert_eq!(entry.tree(), tree);
            prop_assert_eq!(entry.rows(), row..row + tree.len());
            prop_assert_eq!(&batch.tokens()[entry.rows()], tree.tokens());
            let mut alone = VerifyBatch::new();
            alone.push(entry.request(), entry.committed_len(), tree).unwrap();
            prop_assert_eq!(alone.positions(), &batch.positions()[entry.rows()]);
            for (node, position) in tree.nodes().zip(alone.positions()) {
                prop_assert_eq!(*position as usize, entry.committed_len() - 1 + tree.depth(node));
            }
            row += tree.len();
        }
        prop_assert_eq!(batch.num_rows(), row);
        // Filled again in the same memory, it is the same batch.
        let mut reused = batch_of(&trees);
        reused.clear();
        prop_assert_eq!((reused.num_rows(), reused.entries().len()), (0, 0));
        for entry in batch.entries() {
            reused.push(entry.request(), entry.committed_len(), entry.tree()).unwrap();
        }
        prop_assert_eq!(reused.tokens(), batch.tokens());
        prop_assert_eq!(reused.positions(), batch.positions());
    }

    /// Moving rows in place by the plan gives what gathering them from a copy gives, on any pages.
    #[test]
    fn kv_plans_equal_a_gather(tree in any_tree(), seed in any::<u64>(), prefix in 0usize..100, page_size in 1usize..70) {
        let pool = PagePool::new(page_size, 500).unwrap();
        // Other requests hold pages, so that ours are scattered.
        let mut others: Vec<_> = (0..5).map(|_| pool.table()).collect();
        let mut table = pool.table();
        for row in 0..prefix {
            table.lease(1).unwrap().commit(1).unwrap();
            if row % 3 == 0 {
                others[row % 5].lease(page_size).unwrap().commit(page_size).unwrap();
            }
        }
        let lease = table.lease(tree.len()).unwrap();
        let mut memory = vec![usize::MAX; 500 * page_size];
        for row in 0..prefix + tree.len() {
            memory[lease.table().slot(row)] = row;
        }
        let mut batch = VerifyBatch::new();
        batch.push(RequestId(0), prefix + 1, &tree).unwrap();
        let mut verdict = Verdict::new();
        verdict.walk(&batch.entries()[0], NO_LIMIT, |node| Ok(answer(&tree, node, seed)));
        let plan = verdict.commit_plan();
        for step in plan.moves() {
            prop_assert!(step.to < step.from);
            memory[lease.table().slot(step.to)] = memory[lease.table().slot(step.from)];
        }
        prop_assert_eq!(plan.num_kept_rows(), verdict.path.len());
        lease.commit(plan.num_kept_rows()).unwrap();
        prop_assert_eq!(table.len(), prefix + verdict.path.len());
        for row in 0..prefix {
            prop_assert_eq!(memory[table.slot(row)], row, "committed rows stay");
        }
        for (place, node) in verdict.path.iter().enumerate() {
            prop_assert_eq!(memory[table.slot(prefix + place)], prefix + node.index());
        }
        // Control: the same moves in the other order lose a row, unless none is read after it is written.
        let moves: Vec<_> = plan.moves().collect();
        let overlaps = moves.iter().any(|a| moves.iter().any(|b| a.to == b.from));
        if overlaps {
            let mut wrong: Vec<usize> = (0..prefix + tree.len()).collect();
            moves.iter().rev().for_each(|step| wrong[step.to] = wrong[step.from]);
            let kept = verdict.path.iter().map(|n| prefix + n.index());
            prop_assert!(!kept.eq(wrong[prefix..prefix + verdict.path.len()].iter().copied()));
        }
        drop((table, others));
        prop_assert_eq!(pool.num_free_pages(), 500);
    }

    #[test]
    fn leases_roll_back(page_size in 1usize..9, steps in prop::collection::vec((0usize..30, 0usize..30, any::<bool>()), 1..60)) {
        let pool = PagePool::new(page_size, 64).unwrap();
        let mut table = pool.table();
        let mut len = 0;
        for (leased, kept, drop_it) in steps {
            let before = (table.len(), table.pages().to_vec(), pool.num_free_pages());
            match table.lease(leased) {
                Err(error) => {
                    prop_assert_eq!(error.subject(), "free KV pages");
                    prop_assert!((len + leased).div_ceil(page_size) > 64);
                }
                Ok(lease) if drop_it => drop(lease),
                Ok(lease) => match lease.commit(kept) {
                    Ok(()) => len += kept,
                    Err(error) => prop_assert!(kept > leased && error.subject() == "committed rows"),
                },
            }
            if table.len() == before.0 {
                prop_assert_eq!((table.len(), table.pages().to_vec(), pool.num_free_pages()), before);
            }
            prop_assert_eq!(table.len(), len);
            prop_assert_eq!(table.pages().len(), len.div_ceil(page_size));
            prop_assert_eq!(pool.num_free_pages() + table.pages().len(), 64);
        }
    }

    #[test]
    fn statistics_keep_their_identities(trees in prop::collection::vec(any_tree(), 1..20), seed in any::<u64>()) {
        let batch = batch_of(&trees);
        let (mut whole, mut parts) = (AcceptStats::default(), [AcceptStats::default(), AcceptStats::default()]);
        let mut num_emitted = 0;
        for (i, entry) in batch.entries().iter().enumerate() {
            let mut verdict = Verdict::new();
            verdict.walk(entry, NO_LIMIT, |node| Ok(answer(entry.tree(), node, seed)));
            num_emitted += verdict.emitted.len() as u64;
            whole.record(entry, &verdict).unwrap();
            parts[i % 2].record(entry, &verdict).unwrap();
        }
        let [mut merged, other] = parts;
        merged.merge(&other);
        prop_assert_eq!(&merged, &whole);
        prop_assert_eq!(whole.num_emitted_tokens(), num_emitted);
        prop_assert_eq!(whole.num_correct_by_rank().iter().sum::<u64>(), whole.num_correct_drafts());
        let rates = whole.rate_at_depth();
        prop_assert!((1.0 + rates.iter().sum::<f64>() - whole.acceptance_length().unwrap()).abs() < 1e-9);
        prop_assert!(rates.windows(2).all(|pair| pair[0] >= pair[1]));
        for (rate, of_reached) in rates.iter().zip(whole.acceptance_rate_at_depth()) {
            prop_assert!(*rate <= of_reached + 1e-12 && of_reached <= 1.0);
        }
    }
}

#[test]
fn misuse_of_trees_and_batches_is_named() {
    let mut tree = DraftTree::new(TokenId(0));
    let node = tree.push(NodeId::ROOT, TokenId(1)).unwrap();
    assert_eq!(tree.push(NodeId::ROOT, TokenId(1)).unwrap_err().subject(), "sibling drafts");
    assert_eq!(DraftTree::new(TokenId(0)).push(node, TokenId(1)).unwrap_err().subject(), "parent of a draft");
    assert_eq!(
        DraftTree::from_drafts(TokenId(0), &[(1, TokenId(1))]).unwrap_err().subject(),
        "parent of a draft"
    );
    assert_eq!(
        DraftTree::from_drafts(TokenId(0), &[(999, TokenId(1))]).unwrap_err().subject(),
        "parent of a draft"
    );
    for token in 2..256 {
        tree.push(NodeId::ROOT, TokenId(token)).unwrap();
    }
    assert_eq!(tree.push(node, TokenId(1)).unwrap_err().subject(), "draft tree");
    assert_eq!(tree.len(), 256);
    let mut batch = VerifyBatch::new();
    assert_eq!(batch.push(RequestId(0), 0, &tree).unwrap_err().subject(), "committed length");
    assert!(batch.push(RequestId(0), usize::MAX, &tree).is_err());
    assert_eq!((batch.num_rows(), batch.entries().len()), (0, 0));
    assert!(
        PagePool::new(0, 1).is_err() && PagePool::new(1, 0).is_err() && PagePool::new(1, usize::MAX).is_err()
    );
}

#[test]
fn a_verdict_of_another_tree_is_not_counted() {
    let tree = DraftTree::from_drafts(TokenId(0), &[(0, TokenId(1)), (1, TokenId(2))]).unwrap();
    let verdict = walk(&tree, NO_LIMIT, |node| TokenId(node.index() as u32 + 1));
    assert_eq!(verdict.num_correct_drafts(), 2);
    let mut stats = AcceptStats::default();
    for other in [
        DraftTree::new(TokenId(0)),
        DraftTree::from_drafts(TokenId(0), &[(0, TokenId(1)), (0, TokenId(2))]).unwrap(),
    ] {
        let error = stats.record(&batch_of(&[other]).entries()[0], &verdict).unwrap_err();
        assert_eq!(error.subject(), "verdict");
    }
    assert_eq!(stats, AcceptStats::default());
}

#[test]
fn huge_requests_for_rows_are_faults() {
    let pool = PagePool::new(4, 1 << 31).unwrap();
    let mut table = pool.table();
    table.lease(1).unwrap().commit(1).unwrap();
    for rows in [usize::MAX, usize::MAX - 1, 1 << 40] {
        assert_eq!(table.lease(rows).unwrap_err().subject(), "free KV pages");
    }
    assert_eq!((table.len(), pool.num_free_pages()), (1, (1 << 31) - 1));
}

/// What an engine may do wrong with its cache.
#[derive(Clone, Copy, Debug, PartialEq)]
enum EngineFault {
    MovesDescending,
    LastMoveForgotten,
    AnotherTable,
    TableForgotten,
    OneRowTooMany,
}

/// A request of the model: its text, of which all rows but the last token's are in the cache.
struct Served {
    id: u64,
    table: PageTable,
    text: Vec<TokenId>,
}

/// An engine that serves several requests from one pool for so many steps: each step drafts a tree for each, writes
/// all nodes' rows, accepts a path of any length, moves its rows and commits them; now and then a step is given up,
/// or a request is finished and another admitted. A row of the cache is told by its request and text.
///
/// After every step all pages are accounted for, and each committed row holds what belongs to it.
fn serve(num_steps: usize, page_size: usize, fault: Option<EngineFault>) -> Result<BTreeSet<usize>, String> {
    const PAGES: usize = 48;
    let mut numbers = Numbers::new(num_steps as u64 ^ page_size as u64);
    let mut below = |end: usize| (numbers.next_u64() % end as u64) as usize;
    let pool = PagePool::new(page_size, PAGES).unwrap();
    let hash = |id: u64, text: &[TokenId]| {
        text.iter().fold(id, |hash, token| Numbers::new(hash ^ u64::from(token.0) << 20).next_u64())
    };
    let mut cache = vec![0u64; PAGES * page_size];
    let (mut requests, mut num_admitted, mut accepted) = (Vec::<Served>::new(), 0, BTreeSet::new());
    for step in 0..num_steps {
        if requests.len() < 5 && below(4) == 0 {
            num_admitted += 1;
            let text: Vec<TokenId> = (0..2 + below(12)).map(|i| TokenId(i as u32)).collect();
            let mut admitted = Served { id: num_admitted, table: pool.table(), text };
            let num_rows = admitted.text.len() - 1;
            let is_admitted = admitted.table.lease(num_rows).and_then(|lease| {
                for row in 0..num_rows {
                    cache[lease.table().slot(row)] = hash(num_admitted, &admitted.text[..=row]);
                }
                lease.commit(num_rows)
            });
            if is_admitted.is_ok() {
                requests.push(admitted);
            }
        }
        for place in (0..requests.len()).rev() {
            let Served { id, table, text } = &mut requests[place];
            let mut tree = DraftTree::new(text[text.len() - 1]);
            for token in 1..1 + below(9) {
                let parent = tree.len() - 1 - below(3).min(tree.len() - 1);
                tree.push(tree.node(parent).unwrap(), TokenId(token as u32)).unwrap();
            }
            let prefix = table.len();
            let Ok(lease) = table.lease(tree.len()) else {
                // Preempted: its pages are the others'.
                let gone = requests.swap_remove(place);
                if fault == Some(EngineFault::TableForgotten) {
                    std::mem::forget(gone.table);
                }
                continue;
            };
            for node in tree.nodes() {
                let path = path_to(&tree, node);
                let drafts: Vec<TokenId> = path[1..].iter().map(|node| tree.token(*node)).collect();
                cache[lease.table().slot(prefix + node.index())] = hash(*id, &[&text[..], &drafts].concat());
            }
            if below(8) == 0 {
                continue; // given up: the lease rolls back
            }
            let end = tree.node(below(tree.len())).unwrap();
            let path = path_to(&tree, end);
            let mut batch = VerifyBatch::new();
            batch.push(RequestId(*id), prefix + 1, &tree).unwrap();
            let mut verdict = Verdict::new();
            verdict.walk(&batch.entries()[0], NO_LIMIT, |node| {
                let next = path.iter().position(|other| *other == node).and_then(|at| path.get(at + 1));
                Ok(next.map_or(TokenId(77), |next| tree.token(*next)))
            });
            assert_eq!(verdict.path, path);
            accepted.insert(verdict.num_correct_drafts());
            let plan = verdict.commit_plan();
            let mut moves: Vec<_> = plan.moves().collect();
            match fault {
                Some(EngineFault::MovesDescending) => moves.reverse(),
                Some(EngineFault::LastMoveForgotten) => drop(moves.pop()),
                _ => {}
            }
            for step in moves {
                cache[lease.table().slot(step.to)] = cache[lease.table().slot(step.from)];
            }
            let is_short = tree.len() == plan.num_kept_rows();
            let more = usize::from(fault == Some(EngineFault::OneRowTooMany) && !is_short);
            lease.commit(plan.num_kept_rows() + more).unwrap();
            text.extend(&verdict.emitted);
            if text.len() > 60 || below(40) == 0 {
                requests.swap_remove(place);
            }
        }
        if fault == Some(EngineFault::AnotherTable) && requests.len() > 1 {
            let (first, rest) = requests.split_at_mut(1);
            if first[0].table.len() == rest[0].table.len() {
                std::mem::swap(&mut first[0].table, &mut rest[0].table);
            }
        }

        let mut held: Vec<u32> = requests.iter().flat_map(|request| request.table.pages()).copied().collect();
        let num_held = held.len();
        held.sort_unstable();
        held.dedup();
        if held.len() != num_held || num_held + pool.num_free_pages() != PAGES {
            let seen =
                format!("{} free, {num_held} held, {} of them once", pool.num_free_pages(), held.len());
            return Err(format!("pages in step {step}: {seen}"));
        }
        for Served { id, table, text } in &requests {
            if table.len() + 1 != text.len() || table.pages().len() != table.len().div_ceil(page_size) {
                return Err(format!("rows in step {step}: {} of {} tokens", table.len(), text.len()));
            }
            if let Some(row) =
                (0..table.len()).find(|row| cache[table.slot(*row)] != hash(*id, &text[..=*row]))
            {
                return Err(format!("row {row} of request {id} in step {step} holds another"));
            }
        }
    }
    Ok(accepted)
}

/// Pages and rows over ten thousand steps of mixed acceptance, for small and large pages.
#[test]
fn pages_and_rows_are_conserved() {
    for page_size in [1, 4, 16] {
        let accepted = serve(10_000, page_size, None).unwrap();
        assert!((0..=6).all(|count| accepted.contains(&count)), "{accepted:?}");
    }
}

#[test]
fn an_engine_that_errs_is_caught() {
    for (fault, wanted) in [
        (EngineFault::MovesDescending, "holds another"),
        (EngineFault::LastMoveForgotten, "holds another"),
        (EngineFault::AnotherTable, "holds another"),
        (EngineFault::TableForgotten, "pages in step"),
        (EngineFault::OneRowTooMany, "rows in step"),
    ] {
        let seen = serve(10_000, 4, Some(fault)).unwrap_err();
        assert!(seen.contains(wanted), "{fault:?}: {seen}");
    }
}
