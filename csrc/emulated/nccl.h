// The seam between emulated devices and the emulated NCCL (emulated/libnccl/): a library with NCCL's C names, opened
// through the same variable as a real one. The loader hands it this table by its function ar_emulated_nccl_bind.
#pragma once

#include <cstddef>

struct ar_emulated_nccl_part {
  const void* send;
  void* recv;
  void* stream;
  int device;
};

struct ar_emulated_nccl_host {
  int (*current_device)();
  // Enqueues one all-reduce of n ranks: count elements of an NCCL type, sum or (average != 0) mean, each rounded to the type
  // at every hop as a ring does. hang: not null: the operation ends only when this word is set. 0, or a runtime code.
  int (*allreduce)(const ar_emulated_nccl_part* parts, int n, size_t count, int type, int average,
                   const unsigned* hang);
};
