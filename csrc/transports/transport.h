// What every transport is to the communicator: made once, then asked to enqueue calls. The table of them is in comm.cpp.
//
// Data flows one way: a Call comes down with everything checked, the transport enqueues it on the callers' streams and on
// streams of its own, and never waits on the host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../comm.h"

namespace AR_NS {

// One rank's part of a call, checked.
struct Part {
  Stream stream = nullptr;
  View send{}, recv{};
  bool absent = false;
};

struct Call {
  std::vector<Part>& parts;  // by rank; of ranks of other processes nothing is known
  int64_t count = 0;
  int32_t type = 0, wire = 0, op = 0;
  bool strided = false;
  uint64_t number = 0;
  Lane* lane[kMaxRanks] = {};  // streams and events this call may use: the eager ones, or those of its capture
  bool captured = false;
  bool one_capture = false;  // every stream is in the same capture
  bool enqueued = false;     // set once something was enqueued: a failure after that breaks the communicator
};

// Turns checked buffers into a Call's parts.
void fill_parts(const ar_buffer* bufs, const std::vector<int>& locals, std::vector<Part>& parts, Call& call);

class Transport {
 public:
  virtual ~Transport() = default;
  // Why this path does not exist here, "" if it does.
  virtual const std::string& missing() const = 0;
  // Why it cannot serve this type, wire and op, nullptr if it can. Layout and alignment are never a reason.
  virtual const char* refuses(int32_t type, int32_t wire, int32_t op) const = 0;
  virtual int32_t prepare(int64_t max_bytes, ar_error* e) = 0;
  virtual int32_t enqueue(Call& call, ar_error* e) = 0;
  // Across processes: what a rank gives its peers, AR_PEER_HANDLE_BYTES, and what it gets of all of them, by rank.
  virtual int32_t export_memory(int, uint8_t*, ar_error* e) {
    return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", missing().c_str());
  }
  virtual int32_t import_memory(const uint8_t*, ar_error* e) {
    return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", missing().c_str());
  }
  // Then each process stores into the others' memory, and when all have, looks at its own.
  virtual int32_t check_memory(bool, ar_error* e) { return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", missing().c_str()); }
  // Memory of the library behind it that it reduces fastest, one pointer per rank of this process.
  virtual int32_t windows(int64_t, ar_ptr*, ar_error* e) {
    return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", missing().c_str());
  }
  // Of the library behind it (NCCL's version code), 0 if there is none.
  virtual int version() const { return 0; }
  virtual void memory(int rank, int64_t* device_bytes, int64_t* pinned_bytes) const = 0;
};

std::unique_ptr<Transport> make_internal(Comm& comm);
std::unique_ptr<Transport> make_copy_engine(Comm& comm);
// allowed: peer access was proven, or is trusted.
std::unique_ptr<Transport> make_peer(Comm& comm, bool allowed);
struct NcclOptions {
  std::string path;             // "": no NCCL
  const uint8_t* id = nullptr;  // across processes: made by one of them
  bool p2p_disable = false;
};
std::unique_ptr<Transport> make_nccl(Comm& comm, const NcclOptions& options);

// Calls f(T{}, W{}) for the payload and wire types; false where no such kernel exists.
template <class F>
bool with_types(int32_t type, int32_t wire, F f) {
  if (type == AR_F32 && wire == AR_F32) return f(F32{}, F32{}), true;
  if (type == AR_F32 && wire == AR_BF16) return f(F32{}, BF16{}), true;
  if (type == AR_F32 && wire == AR_F16) return f(F32{}, F16{}), true;
  if (type == AR_F16 && wire == AR_F16) return f(F16{}, F16{}), true;
  if (type == AR_BF16 && wire == AR_BF16) return f(BF16{}, BF16{}), true;
  return false;
}
template <class F>
void for_all_types(F f) {
  for (int32_t t : {AR_F32, AR_F16, AR_BF16})
    for (int32_t w : {AR_F32, AR_F16, AR_BF16}) with_types(t, w, f);
}

inline Finish finish_for(const Call& call, int world) {
  Finish f;
  f.divisor = call.op == AR_AVG ? static_cast<float>(world) : 0.0f;
  f.to_wire = world >= 3 && call.wire != call.type;
  return f;
}

}  // namespace AR_NS
