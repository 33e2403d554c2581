// What kernels read and write of device memory, by plain accesses and asynchronous copies, in words of four bytes.
// A word counts once for each block that reads it, and once for each that writes it: the second time it is in a
// register or in the multiprocessor's cache. With one resident block at a time, as blocks are told apart by who was
// there last.
#include <cstdlib>

#include "machine.h"

namespace emulator {

void count_traffic(const char* p, size_t bytes, bool is_write) {
  Machine& m = machine();
  Allocation* a = m.memory.contains(p) ? m.memory.find(p) : nullptr;
  if (!a || a->space != Space::DEVICE || p < a->base || p + bytes > a->base + a->bytes) return;
  if (!a->users) a->users.reset(static_cast<WordUsers*>(std::calloc((a->bytes + 3) / 4, sizeof(WordUsers))));
  const Block& block = *self().block;
  Traffic& traffic = m.traffic[block.grid->kernel->name];
  size_t first = size_t(p - a->base) / 4, last = (size_t(p - a->base) + bytes + 3) / 4;
  for (size_t word = first; word < last; word++) {
    uint32_t& user = is_write ? a->users[word].writer : a->users[word].reader;
    if (user == block.number) continue;
    user = block.number;
    (is_write ? traffic.written_bytes : traffic.read_bytes) += 4;
  }
}

}  // namespace emulator
