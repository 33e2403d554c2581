// The tensor cores' instructions: all lanes of a warp meet, and the last to arrive works for all, in the registers
// of the others. Layouts are those of the PTX manual; lane = 4 * group + member, and an element is 2 bytes.
//
//  * ldmatrix: member m of group g gets elements 2m and 2m + 1 of row g of each 8x8 matrix.
//  * mma.m16n8k16: `a` has rows g and g + 8 by columns 2m, 2m + 1 in a[0] and a[1], and by columns 2m + 8, 2m + 9
//    in a[2] and a[3]; `b` has rows 2m, 2m + 1 and 2m + 8, 2m + 9 of column g; the sums are of row g and columns
//    2m, 2m + 1, then of row g + 8.
//
// Products are exact unless beyond a float's range, and are added to the sum one after the other for ascending k,
// each sum rounded to nearest. A tensor core adds in another order and may round otherwise, in the last bits.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

struct MatrixLoad {
  uint32_t* to;
  const char* row;
  unsigned count;
  size_t stride;
};

void load_matrices(void* const* lanes) {
  const MatrixLoad* of[32];
  for (int lane = 0; lane < 32; lane++) of[lane] = static_cast<const MatrixLoad*>(lanes[lane]);
  const unsigned count = of[0]->count;
  for (unsigned i = 0; i < count; i++) {
    for (int lane = 0; lane < 32; lane++) {
      const int matrix = lane / 8, group = lane % 8;
      uint32_t row[4];
      std::memcpy(row, of[lane]->row + i * of[lane]->stride, sizeof row);
      for (int member = 0; member < 4; member++) of[4 * group + member]->to[4 * i + unsigned(matrix)] = row[member];
    }
  }
}

struct MultiplyAdd {
  float* sums;
  const uint32_t *a, *b;
  unsigned count;
};

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

template <class Format>
void multiply_add(void* const* lanes) {
  const MultiplyAdd* of[32];
  for (int lane = 0; lane < 32; lane++) of[lane] = static_cast<const MultiplyAdd*>(lanes[lane]);
  const unsigned count = of[0]->count;
  auto widen = [](uint32_t pair, float* low, float* high) {
    *low = Format::widen(pair & 0xffff);
    *high = Format::widen(pair >> 16);
  };
  alignas(16) float a[16][16];
  alignas(16) Four b[16][2], sums[16][2];
  float(*b_rows)[8] = reinterpret_cast<float(*)[8]>(b), (*sum_rows)[8] = reinterpret_cast<float(*)[8]>(sums);
  for (int lane = 0; lane < 32; lane++) {
    const int group = lane / 4, k = lane % 4 * 2;
    widen(of[lane]->b[0], &b_rows[k][group], &b_rows[k + 1][group]);
    widen(of[lane]->b[1], &b_rows[k + 8][group], &b_rows[k + 9][group]);
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
    multiply_tile(a, b, sums);
    for (int lane = 0; lane < 32; lane++) {
      const int group = lane / 4, column = lane % 4 * 2;
      std::memcpy(of[lane]->sums + 4 * tile, &sum_rows[group][column], 8);
      std::memcpy(of[lane]->sums + 4 * tile + 2, &sum_rows[group + 8][column], 8);
    }
  }
  machine().stats.multiplied_tiles += count;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

void emu::emu_load_matrices(uint32_t* to, const void* row, unsigned count, size_t stride) {
  MatrixLoad own{to, static_cast<const char*>(row), count, stride};
  if (!machine().is_direct) {
    for (unsigned i = 0; i < count; i++) {
      require_aligned(own.row + i * stride, 16, "row of a matrix");
      plain_access(own.row + i * stride, 16, false, __builtin_return_address(0));
    }
  }
  meet_warp(emu::LOAD_MATRICES + int(count), &own, load_matrices, "a load of matrices");
}

void emu::emu_multiply_add(float* sums, const uint32_t* a, const uint32_t* b, unsigned count, int format) {
  MultiplyAdd own{sums, a, b, count};
  const bool is_bf16 = format == emu::BF16;
  meet_warp(emu::MULTIPLY_ADD + 2 * int(count) + format, &own,
            is_bf16 ? multiply_add<Bf16Format> : multiply_add<F16Format>, "a multiplication of matrices");
}

}  // extern "C"
