// All-reduce over the ranks of a group, fused with the residual addition, RMSNorm and FP8 quantisation.
//
// What it computes, bit for bit: RmsNorm::reduce_add_norm in src/norm.rs. How ranks exchange data and why that
// cannot hang or tear: src/comm/PROTOCOL.md. A block of 256 * warps_per_group threads works on one row after
// another (blockIdx.x, + gridDim.x, ...) and talks to the block of the same index on the other ranks only.
#include "sync.cuh"

namespace ev {

/// What is done with the sum, row by row.
template <class Element>
struct Epilogue {
  Call& call;
  const EvAllReduceNorm& a;
  const Lanes& lanes;
  Pack* row_packs;                                  // this thread's packs of the row: shared, but never read by others
  float (*sums)[kGroups][kMaxRuns];                 // two: a fast warp may be one row ahead
  float (*maxima)[kMaxWarps];                       // two, as above

  EV_DEVICE size_t at(uint32_t row, uint32_t column) const { return size_t(row) * (a.hidden / 8) + column; }
  EV_DEVICE uint32_t column(uint32_t pack) const { return lanes.group * lanes.group_packs + pack; }

  /// Brings what will be needed once the packs are there closer, while they travel.
  EV_DEVICE void prefetch_row(uint32_t row, bool is_finished_here) const {
    if (!(a.flags & EV_NORM)) return;
    lanes.each_pack([&](uint32_t pack) {
      if (column(pack) % 8 != 0) return;  // a line of 128 bytes each
      prefetch(reinterpret_cast<const Pack*>(a.weight) + column(pack));
      if (is_finished_here) prefetch(reinterpret_cast<const Pack*>(a.residual) + at(row, column(pack)));
    });
  }

  /// Residual plus sum, or the sum alone, not rounded yet.
  EV_DEVICE Floats finish(uint32_t row, uint32_t column, const Floats& sum) const {
    if (!(a.flags & EV_NORM)) return sum;
    const Pack residual = reinterpret_cast<const Pack*>(a.residual)[at(row, column)];
    return Floats::unpack<Element>(residual) + sum;
  }

  /// Takes a row's finished packs from `fetch(pack in the group)`, rounds them and writes all outputs. A
  /// barrier.
  template <class Fetch>
  EV_DEVICE void row(uint32_t row, uint32_t row_of_block, Fetch fetch) const {
    const uint32_t buffer = row_of_block % 2;
    Pack* const destination = reinterpret_cast<Pack*>(a.flags & EV_NORM ? a.residual : a.output);
    lanes.each_run([&](uint32_t run, uint32_t pack, bool exists) {
      float square_sum = 0.0f;
      if (exists) {
        const Floats exact = fetch(pack);
        const Pack h = exact.template pack<Element>();
        row_packs[column(pack)] = h;
        destination[at(row, column(pack))] = h;
        square_sum = Floats::unpack<Element>(h).square_sum();
      }
      square_sum = warp_sum(square_sum);
      if (lanes.lane == 0) sums[buffer][lanes.group][run] = square_sum;
    });
    call.failed = __syncthreads_or(call.failed);
    if (call.failed) return poison(row);
    if (!(a.flags & EV_NORM)) return;

    const float mean = lanes.total(sums[buffer]) / float(a.hidden);
    const float scale = 1.0f / sqrtf(mean + a.epsilon);
    float maximum = 0.0f;
    lanes.each_pack([&](uint32_t pack) {
      const Pack y = normalised(pack, scale);
      if (a.output != 0) reinterpret_cast<Pack*>(a.output)[at(row, column(pack))] = y;
      row_packs[column(pack)] = y;
      const Floats values = Floats::unpack<Element>(y);
#pragma unroll
      for (int i = 0; i < 8; i++) maximum = fmaxf(maximum, fabsf(values.v[i]));
    });
    if (a.flags & EV_FP8_PER_ROW) {
      const float row_scale = fmaxf(block_max(maximum, buffer) / kMaxE4m3, kMinScale);
      if (threadIdx.x == 0) reinterpret_cast<float*>(a.scales)[row] = row_scale;
      quantize(row, row_scale);
    } else if (a.flags & EV_FP8_STATIC) {
      quantize(row, a.static_scale);
    }
  }

  EV_DEVICE Pack normalised(uint32_t pack, float scale) const {
    const Floats h = Floats::unpack<Element>(row_packs[column(pack)]);
    const Floats weight = Floats::unpack<Element>(reinterpret_cast<const Pack*>(a.weight)[column(pack)]);
    Floats y;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float factor = a.flags & EV_WEIGHT_PLUS_ONE ? 1.0f + weight.v[i] : weight.v[i];
      y.v[i] = h.v[i] * scale * factor;
    }
    return y.pack<Element>();
  }

  EV_DEVICE float block_max(float v, uint32_t buffer) const {
    v = warp_max(v);
    if (lanes.lane == 0) maxima[buffer][threadIdx.x / 32] = v;
    __syncthreads();
    return warp_max(lanes.lane < blockDim.x / 32 ? maxima[buffer][lanes.lane] : 0.0f);
  }

  EV_DEVICE void quantize(uint32_t row, float scale) const {
    const float inverse = 1.0f / scale;
    lanes.each_pack([&](uint32_t pack) {
      reinterpret_cast<uint2*>(a.quantized)[at(row, column(pack))] =
          Floats::unpack<Element>(row_packs[column(pack)]).quantize(inverse);
    });
  }

  /// Fills every output of a row with NaN: nothing that looks like an answer follows a fault.
  EV_DEVICE void poison(uint32_t row) const {
    const Pack nan = {kEmpty, kEmpty, kEmpty, kEmpty};
    lanes.each_pack([&](uint32_t pack) {
      const size_t place = at(row, column(pack));
      if (a.flags & EV_NORM) reinterpret_cast<Pack*>(a.residual)[place] = nan;
      if (a.output != 0) reinterpret_cast<Pack*>(a.output)[place] = nan;
      if (a.quantized != 0) reinterpret_cast<uint2*>(a.quantized)[place] = make_uint2(kEmpty, kEmpty);
    });
    if (a.scales != 0 && threadIdx.x == 0) reinterpret_cast<uint32_t*>(a.scales)[row] = kEmpty;
  }
};

/// One call: the three algorithms differ in where a pack travels, never in the order of a sum.
template <class Element, uint32_t World>
struct Collective {
  Call& call;
  const EvAllReduceNorm& a;
  const Lanes& lanes;
  const Epilogue<Element>& epilogue;

  /// Calls `action(row, which of this block's rows it is)`.
  template <class Action>
  EV_DEVICE void each_row(Action action) const {
    uint32_t i = 0;
    for (uint32_t row = blockIdx.x; row < a.rows; row += gridDim.x) action(row, i++);
  }

  /// Where this block's places in a slot begin. No other block uses them, whatever the algorithm: blocks
  /// don't count the same calls, so the two slots of different blocks are not in step.
  EV_DEVICE uint32_t block_start() const { return blockIdx.x * a.block_packs; }

  EV_DEVICE Pack partial(uint32_t row, uint32_t pack) const {
    return reinterpret_cast<const Pack*>(a.partial)[epilogue.at(row, epilogue.column(pack))];
  }

  /// The others, each rank beginning with its neighbour, so that not all write to one at a time.
  template <uint32_t Ranks = World, class Action>
  EV_DEVICE void each_peer(Action action) const {
#pragma unroll 1
    for (uint32_t i = 1; i < Ranks; i++) action(a.rank / Ranks * Ranks + (a.rank + i) % Ranks);
  }

  /// The sum over `Ranks` consecutive ranks from `first`, in the one order that every rank and algorithm uses:
  /// ((0 + 1) + 2) + 3, and of eight ranks the sum of the lower and the upper four. Their packs lie in this
  /// rank's slab at `place(rank)`; its own is `own`.
  template <uint32_t Ranks, class Place>
  EV_DEVICE Floats sum(uint32_t first, Pack own, Place place) const {
    Pack packs[Ranks];
    uint32_t missing = 0;
#pragma unroll
    for (uint32_t i = 0; i < Ranks; i++) {
      packs[i] = own;
      if (first + i != a.rank) missing |= 1u << i;
    }
    const auto rank = [&](uint32_t i) { return first + i; };
    call.receive(packs, missing, [&](uint32_t i) { return place(rank(i)); }, rank, EV_PHASE_PARTIALS);
    Floats sum = Floats::unpack<Element>(packs[0]);
#pragma unroll
    for (uint32_t i = 1; i < Ranks && i < 4; i++) sum = sum + Floats::unpack<Element>(packs[i]);
    if constexpr (Ranks == 8) {
      Floats upper = Floats::unpack<Element>(packs[4]);
#pragma unroll
      for (uint32_t i = 5; i < 8; i++) upper = upper + Floats::unpack<Element>(packs[i]);
      sum = sum + upper;
    }
    return sum;
  }

  /// Every rank sends its whole partial to every other, and adds up all.
  EV_DEVICE void one_shot(uint32_t tag) const {
    const auto place = [&](uint32_t from, uint32_t i, uint32_t pack) {
      return block_start() + (from * a.block_rows + i) * (a.hidden / 8) + epilogue.column(pack);
    };
    call.announce(tag, World);
    if (!call.failed && World > 1) {
      each_row([&](uint32_t row, uint32_t i) {
        lanes.each_pack([&](uint32_t pack) {
          const Pack own = partial(row, pack);
          each_peer([&](uint32_t peer) { call.push(peer, place(a.rank, i, pack), own); });
        });
      });
    }
    each_row([&](uint32_t row, uint32_t) { epilogue.prefetch_row(row, true); });
    call.agree(tag, World);
    each_row([&](uint32_t row, uint32_t i) {
      epilogue.row(row, i, [&](uint32_t pack) {
        const auto from_rank = [&](uint32_t from) { return place(from, i, pack); };
        return epilogue.finish(row, epilogue.column(pack), sum<World>(0, partial(row, pack), from_rank));
      });
    });
  }

  /// Each rank owns a slice of the columns: it collects their partials, finishes them and sends the result.
  /// With islands, ranks of one island do so among themselves, and the owners of a slice in both islands
  /// exchange the islands' sums in between.
  template <uint32_t Owners>
  EV_DEVICE void two_shot(uint32_t tag) const {
    constexpr uint32_t kGroupsOwned = kGroups / Owners;
    const uint32_t island_start = a.rank / Owners * Owners;
    const uint32_t owner = island_start + lanes.group / kGroupsOwned;
    const uint32_t slice = kGroupsOwned * lanes.group_packs;
    const uint32_t row_packs = a.hidden / 8;
    const uint32_t islands_start = block_start() + Owners * a.block_rows * slice;
    const uint32_t results_start = islands_start + (Owners < World ? 4 * a.block_rows * slice : 0);
    const auto in_slice = [&](uint32_t pack) { return lanes.group % kGroupsOwned * lanes.group_packs + pack; };
    const auto partial_place = [&](uint32_t from, uint32_t i, uint32_t pack) {
      return block_start() + ((from - island_start) * a.block_rows + i) * slice + in_slice(pack);
    };
    const auto island_place = [&](uint32_t island, uint32_t i, uint32_t pack) {
      return islands_start + 2 * (island * a.block_rows + i) * slice + in_slice(pack);  // first halves, second halves
    };
    const auto result_place = [&](uint32_t i, uint32_t pack) {
      return results_start + i * row_packs + epilogue.column(pack);
    };

    call.announce(tag, World);
    if (!call.failed && owner != a.rank) {
      each_row([&](uint32_t row, uint32_t i) {
        lanes.each_pack([&](uint32_t pack) {
          call.push(owner, partial_place(a.rank, i, pack), partial(row, pack));
        });
      });
    }
    each_row([&](uint32_t row, uint32_t) { epilogue.prefetch_row(row, owner == a.rank); });
    call.agree(tag, World);

    const auto send_result = [&](uint32_t row, uint32_t i, uint32_t pack, const Floats& sum) {
      if (call.failed) return;
      // To itself too: then all columns of a row are taken alike.
      const Pack h = epilogue.finish(row, epilogue.column(pack), sum).template pack<Element>();
      each_peer<Owners>([&](uint32_t peer) { call.push(peer, result_place(i, pack), h); });
      call.push(a.rank, result_place(i, pack), h);
    };
    if (owner == a.rank) {
      each_row([&](uint32_t row, uint32_t i) {
        lanes.each_pack([&](uint32_t pack) {
          const auto from_rank = [&](uint32_t from) { return partial_place(from, i, pack); };
          const Floats island = sum<Owners>(island_start, partial(row, pack), from_rank);
          if constexpr (Owners == World) {
            send_result(row, i, pack, island);
          } else {
            if (call.failed) return;
            const uint32_t to = island_place(a.rank / Owners, i, pack);
#pragma unroll
            for (int half = 0; half < 2; half++) {
              call.push((a.rank + Owners) % World, to + half * slice, island.bits(half));
              call.push(a.rank, to + half * slice, island.bits(half));
            }
          }
        });
      });
      if constexpr (Owners < World) {
        each_row([&](uint32_t row, uint32_t i) {
          lanes.each_pack([&](uint32_t pack) {
            const auto island_sum = [&](uint32_t island) {
              Pack halves[2];
              const auto place = [&](uint32_t half) { return island_place(island, i, pack) + half * slice; };
              const auto from = [&](uint32_t) { return island * Owners + a.rank % Owners; };
              call.receive(halves, 3, place, from, EV_PHASE_ISLANDS);
              return Floats::from_bits(halves[0], halves[1]);
            };
            const Floats lower = island_sum(0);
            send_result(row, i, pack, lower + island_sum(1));
          });
        });
      }
    }
    each_row([&](uint32_t row, uint32_t i) {
      epilogue.row(row, i, [&](uint32_t pack) {
        Pack h[1];
        const auto place = [&](uint32_t) { return result_place(i, pack); };
        call.receive(h, 1, place, [&](uint32_t) { return owner; }, EV_PHASE_RESULTS);
        return Floats::unpack<Element>(h[0]);  // rounded by its owner: rounding again changes nothing
      });
    });
  }
};

template <class Element, uint32_t World, uint32_t Algorithm>
EV_DEVICE void all_reduce_norm(const EvAllReduceNorm& a) {
  EV_DYNAMIC_SHARED(row_packs);  // hidden elements
  EV_SHARED(float, sums, [2][kGroups][kMaxRuns]);
  EV_SHARED(float, maxima, [2][kMaxWarps]);
  const Lanes lanes(a.hidden, a.warps_per_group);
  Call call(a);
  const Epilogue<Element> epilogue{call, a, lanes, reinterpret_cast<Pack*>(row_packs), sums, maxima};
  const Collective<Element, World> collective{call, a, lanes, epilogue};
  const uint32_t tag = a.tag | gridDim.x << EV_TAG_BLOCKS_SHIFT;
  if constexpr (Algorithm == EV_ONE_SHOT) {
    collective.one_shot(tag);
  } else if constexpr (Algorithm == EV_TWO_SHOT) {
    collective.template two_shot<World>(tag);
  } else {
    collective.template two_shot<4>(tag);
  }
  // `agree` was a barrier: no thread still reads the count.
  if (threadIdx.x == 0) call.count();
}

}  // namespace ev

#define EV_INSTANCES(X)                                                               \
  X(one_shot, EV_ONE_SHOT, 1) X(one_shot, EV_ONE_SHOT, 2)                             \
  X(one_shot, EV_ONE_SHOT, 4) X(one_shot, EV_ONE_SHOT, 8)                             \
  X(two_shot, EV_TWO_SHOT, 2) X(two_shot, EV_TWO_SHOT, 4) X(two_shot, EV_TWO_SHOT, 8) \
  X(hierarchical, EV_HIERARCHICAL, 8)

// Packs of eight ranks side by side need more registers than 1024 threads leave; geometry in plan.rs knows.
#define EV_MAX_THREADS(world) ((world) == 8 ? 512 : 1024)

#define EV_DEFINE_FOR(name, algorithm, world, suffix, Element)                                     \
  extern "C" __global__ void __launch_bounds__(EV_MAX_THREADS(world), 1)                           \
      ev_all_reduce_norm_##name##_##suffix##_w##world(const __grid_constant__ EvAllReduceNorm a) { \
    ev::wait_for_predecessors();                                                                   \
    ev::all_reduce_norm<ev::Element, world, algorithm>(a);                                         \
  }                                                                                                \
  EV_KERNEL(ev_all_reduce_norm_##name##_##suffix##_w##world)

#define EV_DEFINE(name, algorithm, world)           \
  EV_DEFINE_FOR(name, algorithm, world, bf16, Bf16) \
  EV_DEFINE_FOR(name, algorithm, world, f16, F16)

EV_INSTANCES(EV_DEFINE)
