//! Attention bits: a tree row is its path's plain decoding.

use proptest::prelude::*;

use super::*;
use crate::DraftTree;
use crate::kv::PagePool;
use crate::tree::{NodeId, TokenId};
use crate::verify::{OutputLimits, RequestId, Verdict, VerifyBatch};

const SHAPE: KvShape = KvShape { num_layers: 2, num_kv_heads: 2, head_dim: 64 };
const WIDTH: usize = 128; // keys in a row
const HEADS: usize = 6;
const SCALE: f32 = 0.125;

fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The key, value and query of a row, by a number that stands for its text.
fn kvq(id: u64) -> [Vec<f32>; 3] {
    [random(3 * id + 1, WIDTH), random(3 * id + 2, WIDTH), random(3 * id + 3, HEADS * 64)]
}

fn write(cache: &mut KvCache, slots: &[usize], ids: &[u64]) {
    let rows: Vec<_> = ids.iter().map(|id| kvq(*id)).collect();
    let keys: Vec<f32> = rows.iter().flat_map(|r| r[0].clone()).collect();
    let values: Vec<f32> = rows.iter().flat_map(|r| r[1].clone()).collect();
    for layer in 0..SHAPE.num_layers {
        cache.write(layer, slots, &keys, &values).unwrap();
    }
}

/// Plain decoding: the rows `ids` in a cache of their own, the last one's output.
fn decode(cpu: &Cpu, ids: &[u64]) -> Vec<u32> {
    let pool = PagePool::new(KvCache::PAGE_SIZE, 64).unwrap();
    let mut table = pool.table();
    table.reserve(ids.len()).unwrap();
    let mut cache = KvCache::new(SHAPE, 64).unwrap();
    write(&mut cache, &(0..ids.len()).map(|row| table.slot(row)).collect::<Vec<_>>(), ids);
    let row = AttentionRow { table: &table, prefix_len: ids.len(), nodes: NodeSet::default() };
    let mut out = vec![0.0; HEADS * 64];
    cache.attend(cpu, 1, SCALE, &kvq(ids[ids.len() - 1])[2], &[row], &mut out).unwrap();
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn equals_the_definition_in_f64() {
    let cpu = Cpu::with_threads(1).unwrap();
    let ids: Vec<u64> = (0..77).collect();
    let got = decode(&cpu, &ids);
    let rows: Vec<_> = ids.iter().map(|id| kvq(*id)).collect();
    for head in 0..HEADS {
        let kv = head / 3 * 64..head / 3 * 64 + 64;
        let query = &rows[76][2][head * 64..][..64];
        let dot =
            |key: &[f32]| query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let scores = rows.iter().map(|row| (dot(&row[0][kv.clone()]) * f64::from(SCALE)).exp());
        let scores: Vec<f64> = scores.collect();
        let sum: f64 = scores.iter().sum();
        for d in 0..64 {
            let want: f64 =
                rows.iter().zip(&scores).map(|(row, s)| s * f64::from(row[1][kv.start + d])).sum();
            let seen = f64::from(f32::from_bits(got[head * 64 + d]));
            assert!((seen - want / sum).abs() < 1e-6, "{seen} {}", want / sum);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Every node of every tree of a batch has the bits of plainly decoding its path, whatever lies in
    /// other nodes' rows and in unused ones; a prompt in chunks likewise; and committed rows stay right.
    #[test]
    fn tree_rows_equal_plain_decoding(
        requests in prop::collection::vec((0usize..80, 1usize..40, any::<u64>()), 1..4),
        threads in 1usize..4,
    ) {
        let cpu = Cpu::with_threads(threads).unwrap();
        let pool = PagePool::new(KvCache::PAGE_SIZE, 64).unwrap();
        let mut cache = KvCache::new(SHAPE, 64).unwrap();
        // Every slot of the cache is poison until it is written.
        let all: Vec<usize> = (0..64 * KvCache::PAGE_SIZE).collect();
        let poison = vec![f32::NAN; all.len() * WIDTH];
        (0..2).for_each(|layer| cache.write(layer, &all, &poison, &poison).unwrap());
        let mut tables: Vec<_> = requests.iter().map(|_| pool.table()).collect();
        let (mut trees, mut ids) = (Vec::new(), Vec::<Vec<u64>>::new());
        for (r, (&(prefix, nodes, seed), table)) in requests.iter().zip(&mut tables).enumerate() {
            let mut tree = DraftTree::new(TokenId(0));
            for node in 1..nodes {
                let parent = (seed.rotate_left(node as u32) as usize % node).max(node.saturating_sub(6));
                tree.push(tree.node(parent).unwrap(), TokenId(node as u32)).unwrap();
            }
            table.reserve(prefix + nodes).unwrap();
            let row_ids: Vec<u64> = (0..(prefix + nodes) as u64).map(|i| 1000 * (r as u64 + 1) + i).collect();
            write(&mut cache, &(0..prefix + nodes).map(|row| table.slot(row)).collect::<Vec<_>>(), &row_ids);
            trees.push(tree);
            ids.push(row_ids);
        }
        let (mut rows, mut queries, mut want) = (Vec::new(), Vec::new(), Vec::new());
        for (((&(prefix, ..), table), tree), ids) in requests.iter().zip(&tables).zip(&trees).zip(&ids) {
            for node in tree.nodes() {
                let nodes = *tree.ancestors(node);
                rows.push(AttentionRow { table, prefix_len: prefix, nodes });
                queries.extend(kvq(ids[prefix + node.index()])[2].clone());
                let path = (0..prefix).chain(nodes.iter().map(|n| prefix + n));
                want.extend(decode(&cpu, &path.map(|row| ids[row]).collect::<Vec<_>>()));
            }
            // The last of the prefix again, plainly decoded, and then as the rows of a prompt: rows of one
            // table and prefix with and without nodes, side by side.
            if prefix > 0 {
                rows.push(AttentionRow { table, prefix_len: prefix, nodes: NodeSet::default() });
                queries.extend(kvq(ids[prefix - 1])[2].clone());
                want.extend(decode(&cpu, &ids[..prefix]));
            }
            for row in prefix.saturating_sub(5)..prefix {
                rows.push(AttentionRow { table, prefix_len: row + 1, nodes: NodeSet::default() });
                queries.extend(kvq(ids[row])[2].clone());
                want.extend(decode(&cpu, &ids[..=row]));
            }
        }
        let mut out = vec![0.0; queries.len()];
        cache.attend(&cpu, 1, SCALE, &queries, &rows, &mut out).unwrap();
        prop_assert!(out.iter().map(|x| x.to_bits()).eq(want));
        drop(rows);

        // Commit a path: its rows are then the request's next rows.
        let (prefix, ..) = requests[0];
        let mut batch = VerifyBatch::new();
        batch.push(RequestId(0), prefix + 1, &trees[0]).unwrap();
        let mut verdict = Verdict::new();
        let limits = OutputLimits { stop_tokens: &[], num_remaining: 99 };
        verdict.walk(&batch.entries()[0], limits, |node| {
            Ok(trees[0].children(node).last().map_or(TokenId(0), |child| trees[0].token(child)))
        });
        cache.commit(&tables[0], verdict.commit_plan()).unwrap();
        let (mut moved, mut fresh) = (Vec::new(), Vec::new());
        for (place, node) in verdict.path.iter().enumerate() {
            cache.read_row(tables[0].slot(prefix + place), &mut moved).unwrap();
            let [key, value, _] = kvq(ids[0][prefix + node.index()]);
            (0..2).for_each(|_| fresh.extend(key.iter().chain(&value).copied()));
        }
        prop_assert_eq!(moved, fresh);
    }
}

#[test]
fn misuse_is_an_error_and_writes_nothing() {
    let cpu = Cpu::with_threads(1).unwrap();
    assert!(KvCache::new(KvShape { head_dim: 48, ..SHAPE }, 4).is_err());
    assert!(KvCache::new(KvShape { num_layers: 0, ..SHAPE }, 4).is_err());
    assert!(KvCache::new(SHAPE, 0).is_err() && KvCache::new(SHAPE, usize::MAX).is_err());
    assert!(KvCache::new(KvShape { num_layers: usize::MAX, ..SHAPE }, 4).is_err());
    let mut cache = KvCache::new(SHAPE, 4).unwrap();
    let row = vec![1.0; WIDTH];
    assert!(cache.write(2, &[0], &row, &row).is_err());
    assert!(cache.write(0, &[128], &row, &row).is_err());
    assert!(cache.write(0, &[0], &row[1..], &row).is_err());
    assert!(cache.read_row(0, &mut Vec::new()).is_err() && cache.read_row(999, &mut Vec::new()).is_err());
    let pool = PagePool::new(KvCache::PAGE_SIZE, 4).unwrap();
    let mut table = pool.table();
    table.reserve(1).unwrap();
    let mut out = vec![0.0; HEADS * 64];
    let query = out.clone();
    let seen = |prefix_len, nodes| AttentionRow { table: &table, prefix_len, nodes };
    let none = NodeSet::default();
    assert!(cache.attend(&cpu, 0, SCALE, &query, &[seen(1, none)], &mut out).is_err(), "never written");
    cache.write(0, &[0], &row, &row).unwrap();
    for bad in [seen(0, none), seen(33, none), seen(30, none.with(9))] {
        assert!(cache.attend(&cpu, 0, SCALE, &query, &[bad], &mut out).is_err());
    }
    assert!(cache.attend(&cpu, 2, SCALE, &query, &[seen(1, none)], &mut out).is_err());
    assert!(cache.attend(&cpu, 0, SCALE, &query[1..], &[seen(1, none)], &mut out).is_err());
    assert!(cache.attend(&cpu, 0, SCALE, &query[..64], &[seen(1, none)], &mut out[..64]).is_err());
    assert!(cache.attend(&cpu, 0, SCALE, &query, &[], &mut out).is_err());
    assert!(
        cache.attend(&cpu, 0, SCALE, &query, &[seen(usize::MAX, none.with(0).with(1))], &mut out).is_err()
    );
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(cache.attend(&cpu, 0, scale, &query, &[seen(1, none)], &mut out).is_err());
    }
    for page_size in [16, 64] {
        let pool = PagePool::new(page_size, 4).unwrap();
        let mut other = pool.table();
        other.reserve(1).unwrap();
        let row = AttentionRow { table: &other, prefix_len: 1, nodes: none };
        assert!(cache.attend(&cpu, 0, SCALE, &query, &[row], &mut out).is_err());
        assert!(cache.commit(&other, CommitPlan::new(0, &[])).is_err());
    }
    assert!(out.iter().all(|x| *x == 0.0));
    cache.attend(&cpu, 0, SCALE, &query, &[seen(1, none)], &mut out).unwrap();
    assert_eq!(out[0], 1.0);
    let path = [
        NodeId::ROOT,
        DraftTree::from_drafts(TokenId(0), &[(0, TokenId(1)), (0, TokenId(2))]).unwrap().node(2).unwrap(),
    ];
    assert!(cache.commit(&table, CommitPlan::new(31, &path)).is_err(), "no page for row 33");
}
