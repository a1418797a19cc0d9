// The dozen NCCL declarations that are used, so that nothing of NCCL is needed to build. tests/cpp/nccl_api_test.cpp
// compares them with nccl.h where one is installed. Names and values are NCCL's own (2.18 and later).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ar {
namespace nccl {

using Comm = struct ncclComm*;
using Stream = void*;
struct UniqueId {
  char internal[128];
};
// The layout of 2.18, which every later library accepts by its size and version fields.
struct Config {
  size_t size = 48;
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 1;
  int cga_cluster_size = INT32_MIN;  // INT32_MIN, nullptr: NCCL's choice
  int min_ctas = INT32_MIN;
  int max_ctas = INT32_MIN;
  const char* net_name = nullptr;
  int split_share = INT32_MIN;
  int padding = 0;
};
static_assert(sizeof(Config) == 48, "ncclConfig_t of 2.18");

enum Result : int { kSuccess = 0, kInProgress = 7 };
enum Type : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9
};
enum Op : int { kSum = 0, kAvg = 4 };
constexpr int kOldest = 21800;
constexpr int kWindowSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC

struct Api {
  int (*GetVersion)(int*);
  int (*GetUniqueId)(UniqueId*);
  int (*CommInitRankConfig)(Comm*, int, UniqueId, int, Config*);
  int (*CommDestroy)(Comm);
  int (*CommAbort)(Comm);
  int (*CommGetAsyncError)(Comm, int*);
  const char* (*GetErrorString)(int);
  const char* (*GetLastError)(Comm);
  int (*AllReduce)(const void*, void*, size_t, int, int, Comm, Stream);
  int (*GroupStart)();
  int (*GroupEnd)();
  // Symmetric windows, from 2.27 on; all null where one is missing.
  int (*MemAlloc)(void**, size_t);
  int (*MemFree)(void*);
  int (*CommWindowRegister)(Comm, void*, size_t, void**, int);
};

}  // namespace nccl
}  // namespace ar
