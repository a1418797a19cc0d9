// The emulated NCCL: NCCL's C names over emulated devices, so that opening, symbol checks, fallback and error mapping are
// exercised without a GPU. A shared library of its own; what a real one does wrong can be asked for:
//   -DAR_NCCL_VERSION=21700        too old            -DAR_NCCL_WITHOUT_GROUP       a missing symbol
//   -DAR_NCCL_WITHOUT_WINDOWS      as before 2.27
//   AR_EMULATED_NCCL=init|call|hang|window (environment)   initialisation fails, calls fail, the operation never ends, no
//                                  window can be registered
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "../../transports/nccl_api.h"
#include "../nccl.h"

#ifndef AR_NCCL_VERSION
#define AR_NCCL_VERSION 23007
#endif
#define API extern "C" __attribute__((visibility("default")))

using namespace ar::nccl;

struct ar::nccl::ncclComm {
  int ranks, rank, device;
  void* room;
};

namespace {

const ar_emulated_nccl_host* host = nullptr;
thread_local int depth = 0;
struct Pending {
  ar_emulated_nccl_part part;
  size_t count;
  int type, op;
  ar::nccl::Comm comm;
};
thread_local std::vector<Pending> pending;

bool asked(const char* what) {
  const char* v = std::getenv("AR_EMULATED_NCCL");
  return v != nullptr && std::strcmp(v, what) == 0;
}

int flush() {
  std::vector<Pending> all;
  all.swap(pending);
  for (size_t at = 0; at < all.size();) {
    const int n = all[at].comm->ranks;
    std::vector<ar_emulated_nccl_part> parts(static_cast<size_t>(n));
    for (int r = 0; r < n; r++) {
      if (at + static_cast<size_t>(r) >= all.size()) return 5;  // a rank is missing from the group
      const Pending& p = all[at + static_cast<size_t>(r)];
      if (p.count != all[at].count || p.type != all[at].type || p.op != all[at].op) return 5;
      parts[static_cast<size_t>(p.comm->rank)] = p.part;
    }
    if (asked("call")) return 3;
    if (host->allreduce(all[at].comm->room, parts.data(), n, all[at].count, all[at].type, all[at].op == kAvg,
                        asked("hang")) != 0)
      return 1;
    at += static_cast<size_t>(n);
  }
  return kSuccess;
}

}  // namespace

API void ar_emulated_nccl_bind(const void* table) { host = static_cast<const ar_emulated_nccl_host*>(table); }

API int ncclGetVersion(int* v) {
  *v = AR_NCCL_VERSION;
  return kSuccess;
}
API int ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  void* room = host->room();
  std::memcpy(id->internal, &room, sizeof(room));
  return kSuccess;
}
API int ncclCommInitRankConfig(ar::nccl::Comm* comm, int n, UniqueId id, int rank, Config* config) {
  if (asked("init")) return 2;
  if (config == nullptr || config->magic != 0xcafebeef || config->size < 48) return 4;
  void* room = nullptr;
  std::memcpy(&room, id.internal, sizeof(room));
  *comm = new ar::nccl::ncclComm{n, rank, host->current_device(), room};
  return kSuccess;
}
API int ncclCommDestroy(ar::nccl::Comm c) {
  host->leave(c->room, c->rank, 0);
  delete c;
  return kSuccess;
}
API int ncclCommAbort(ar::nccl::Comm c) {
  host->leave(c->room, c->rank, 1);
  return kSuccess;  // never freed: it is called beside a call in flight
}
API int ncclCommGetAsyncError(ar::nccl::Comm, int* result) {
  *result = kSuccess;
  return kSuccess;
}
API const char* ncclGetErrorString(int r) {
  static const char* const texts[] = {
      "no error",         "unhandled cuda error", "unhandled system error", "internal error",
      "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
  return r >= 0 && r < 8 ? texts[r] : "unknown result code";
}
API const char* ncclGetLastError(ar::nccl::Comm) { return "emulated NCCL"; }
API int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, ar::nccl::Comm c,
                      ar::nccl::Stream s) {
  if (op != kSum && op != kAvg) return 4;
  pending.push_back({{send, recv, s, c->device}, count, type, op, c});
  return depth == 0 ? flush() : static_cast<int>(kSuccess);
}
#ifndef AR_NCCL_WITHOUT_GROUP
API int ncclGroupStart() {
  depth++;
  return kSuccess;
}
#endif
#ifndef AR_NCCL_WITHOUT_WINDOWS
API int ncclMemAlloc(void** p, size_t bytes) { return host->malloc(p, bytes) == 0 ? kSuccess : 1; }
API int ncclMemFree(void* p) { return host->free(p) == 0 ? kSuccess : 1; }
API int ncclCommWindowRegister(ar::nccl::Comm c, void* p, size_t bytes, void** window, int flags) {
  if (asked("window")) return 5;
  if (p == nullptr || bytes == 0 || flags != kWindowSymmetric || depth == 0) return 4;
  *window = c;
  return kSuccess;
}
#endif
API int ncclGroupEnd() { return --depth == 0 ? flush() : static_cast<int>(kSuccess); }
