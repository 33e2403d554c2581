// The tensor cores' instructions: all lanes of a warp meet, and the last to arrive works for all, in the
// registers of the others. Layouts are those of the PTX manual; lane = 4 * group + member, and an element has
// 2 bytes.
//
//  * ldmatrix: member m of group g gets elements 2m and 2m + 1 of row g of each 8x8 matrix.
//  * mma.m16n8k16: `a` has rows g and g + 8 by columns 2m, 2m + 1 in a[0] and a[1], and by columns 2m + 8,
//    2m + 9 in a[2] and a[3]; `b` has rows 2m, 2m + 1 and 2m + 8, 2m + 9 of column g; the sums are of row g and
//    columns 2m, 2m + 1, then of row g + 8.
//
// Products are exact unless beyond a float's range, and are added to the sum one after the other for ascending
// k, each sum rounded to nearest. A tensor core adds in another order and may round otherwise, in the last bits.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

using emu::MatrixLoad;
using emu::TileProduct;

struct Loads {
  const MatrixLoad* first;
  unsigned num;
};

void load_matrices(void* const* lanes) {
  const Loads* of[32];
  for (int lane = 0; lane < 32; lane++) of[lane] = static_cast<const Loads*>(lanes[lane]);
  for (unsigned k = 0; k < of[0]->num; k++) {
    uint32_t* to[32];
    for (int lane = 0; lane < 32; lane++) to[lane] = of[lane]->first[k].to;
    for (int lane = 0; lane < 32; lane++) {
      const MatrixLoad& load = of[lane]->first[k];
      const int matrix = lane / 8, first_lane = lane % 8 * 4;
      for (unsigned i = 0; i < load.count; i++) {
        uint32_t row[4];
        std::memcpy(row, static_cast<const char*>(load.row) + i * load.stride, sizeof row);
        for (int member = 0; member < 4; member++) {
          to[first_lane + member][4 * i + unsigned(matrix)] = row[member];
        }
      }
    }
  }
}

struct Bf16Format {
  static float widen(uint32_t bits) { return __uint_as_float(bits << 16); }
};

struct F16Format {
  // Exponent and fraction at a float's places, then the difference of the biases as a factor.
  static float widen(uint32_t bits) {
    uint32_t magnitude = __float_as_uint(__uint_as_float((bits & 0x7fff) << 13) * 0x1p112f);
    uint32_t special = (bits & 0x7c00) == 0x7c00 ? emu::FLOAT_INFINITY_BITS : 0;
    return __uint_as_float(magnitude | special | (bits & 0x8000) << 16);
  }
};

// What the host multiplies at a time.
typedef float Four __attribute__((vector_size(16)));

void multiply_tile(const float (&a)[16][16], const Four (&b)[16][2], Four (&sums)[16][2]) {
  for (int row = 0; row < 16; row += 4) {  // so many sums fit the host's registers
    Four sum[4][2];
    std::memcpy(sum, sums[row], sizeof sum);
    for (int k = 0; k < 16; k++) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const Four factor = {a[row + i][k], a[row + i][k], a[row + i][k], a[row + i][k]};
        sum[i][0] += factor * b[k][0];
        sum[i][1] += factor * b[k][1];
      }
    }
    std::memcpy(sums[row], sum, sizeof sum);
  }
}

constexpr unsigned MAX_PLANES = 2;

template <class Format>
void multiply_add(void* const* lanes) {
  const TileProduct* of[32];
  for (int lane = 0; lane < 32; lane++) of[lane] = static_cast<const TileProduct*>(lanes[lane]);
  const unsigned count = of[0]->count, planes = of[0]->planes;
  if (planes > MAX_PLANES) fail_and_leave(Failure::TRAP, "too many planes: " + describe(self()));
  auto widen = [](uint32_t pair, float* low, float* high) {
    *low = Format::widen(pair & 0xffff);
    *high = Format::widen(pair >> 16);
  };
  alignas(16) float a[16][16];
  Four b[MAX_PLANES][16][2], sums[16][2];
  float(*sum_rows)[8] = reinterpret_cast<float(*)[8]>(sums);
  for (unsigned plane = 0; plane < planes; plane++) {
    float(*rows)[8] = reinterpret_cast<float(*)[8]>(b[plane]);
    for (int lane = 0; lane < 32; lane++) {
      const int group = lane / 4, k = lane % 4 * 2;
      widen(of[lane]->b[2 * plane], &rows[k][group], &rows[k + 1][group]);
      widen(of[lane]->b[2 * plane + 1], &rows[k + 8][group], &rows[k + 9][group]);
    }
  }
  for (unsigned tile = 0; tile < count; tile++) {
    for (int lane = 0; lane < 32; lane++) {
      const int group = lane / 4, column = lane % 4 * 2;
      const uint32_t* own = of[lane]->a + 4 * tile;
      widen(own[0], &a[group][column], &a[group][column + 1]);
      widen(own[1], &a[group + 8][column], &a[group + 8][column + 1]);
      widen(own[2], &a[group][column + 8], &a[group][column + 9]);
      widen(own[3], &a[group + 8][column + 8], &a[group + 8][column + 9]);
      std::memcpy(&sum_rows[group][column], of[lane]->sums + 4 * tile, 8);
      std::memcpy(&sum_rows[group + 8][column], of[lane]->sums + 4 * tile + 2, 8);
    }
    for (unsigned plane = 0; plane < planes; plane++) multiply_tile(a, b[plane], sums);
    for (int lane = 0; lane < 32; lane++) {
      const int group = lane / 4, column = lane % 4 * 2;
      std::memcpy(of[lane]->sums + 4 * tile, &sum_rows[group][column], 8);
      std::memcpy(of[lane]->sums + 4 * tile + 2, &sum_rows[group + 8][column], 8);
    }
  }
  machine().stats.multiplied_tiles += count * planes;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

void emu::emu_load_matrices(const MatrixLoad* loads, unsigned num_loads) {
  int op = emu::LOAD_MATRICES;
  for (unsigned k = 0; k < num_loads; k++) {
    op += int(loads[k].count);
    if (machine().is_direct) continue;
    for (unsigned i = 0; i < loads[k].count; i++) {
      const char* row = static_cast<const char*>(loads[k].row) + i * loads[k].stride;
      require_aligned(row, 16, "row of a matrix");
      plain_access(row, 16, false, __builtin_return_address(0));
    }
  }
  Loads own{loads, num_loads};
  meet_warp(op, &own, load_matrices, "a load of matrices");
}

void emu::emu_multiply_add(const TileProduct& product) {
  const bool is_bf16 = product.format == emu::BF16;
  const int op = emu::MULTIPLY_ADD + int(product.count * 4 + product.planes * 2) + product.format;
  auto action = is_bf16 ? multiply_add<Bf16Format> : multiply_add<F16Format>;
  meet_warp(op, const_cast<TileProduct*>(&product), action, "a multiplication of matrices");
}

}  // extern "C"
