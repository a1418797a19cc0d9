// The communicator: ranks, the order of calls, captures, memory that outlives them, failures and the end.
//
// Order. Eager calls form one sequence, whatever streams they are given: each rank's end event of call k is awaited by
// call k+1 where its stream is another one. Overlapping calls from several threads are serialised by one mutex, so the
// order of enqueueing is one order for all devices: that also keeps kernels of two calls from waiting for each other.
// Captures. A captured call uses streams and events of its own capture only (Lanes), and ends joined to everything it
// forked; between a graph launch and another use of the communicator the caller orders every rank's stream.
// Processes. A communicator knows all ranks; `locals` are those of this process, all of them in the single-process case.
// Loops that enqueue run over locals; what ranks of other processes need to see is in the board and in staging (shared.h),
// which are pinned memory of this process or a file that all processes map. Events do not leave a process.
// Memory. Everything kernels or copies touch belongs to a Storage; graphs retain it, Close hands it to the reaper, which
// frees it when the device and every graph are done with it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend.h"
#include "kernels/shares.h"
#include "shared.h"
#include "status.h"

namespace AR_NS {

// Blocks per rank of the internal kernels. In a graph on two H200, 2026-11-30, with 8, 16, 24 blocks: 64 KiB F32 8.8, 8.3,
// 12.5 us; 256 KiB 18.2, 17.4, 17.9; 1 MiB 48.3, 48.3, 49.7.
constexpr int kDefaultBlocks = 16;

class Transport;
struct Part;
struct Call;

// Puts the calling thread's device back when it goes.
class DeviceGuard {
 public:
  DeviceGuard() { had_ = get_device(&device_) == kOk; }
  ~DeviceGuard() {
    if (had_) set_device(device_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_ = 0;
  bool had_ = false;
};

// An event and whether it was recorded in this life of its Lanes: an event last recorded in another capture cannot be
// waited on, so a wait on an unrecorded Mark is left out.
struct Mark {
  Event event = nullptr;
  bool recorded = false;
  // Of a rank of another process (Comm::publish): its flag and the value there that stands for this record; who it is.
  const uint32_t* told = nullptr;
  uint32_t value = 0;
  int peer = -1;
};

// Streams and events of one rank for one use: all eager calls, or one capture. Made on demand, kept until the end.
struct Lane {
  Stream send = nullptr, receive = nullptr;
  Mark end;                      // the rank's last call
  uint64_t last = 0;             // the identity of its stream
  Mark ready;                    // the caller's stream, at the start of a call (or around a shared launch)
  std::vector<Mark> chunk[2];    // uploaded, by slot and chunk
  Mark uploaded[2];              // the slot's last chunk (a copy of its Mark)
  Mark converted[2], summed[2];  // by slot
  Mark downloaded[2];            // this rank read every peer's slot, or its box
  // Two-shot of the copy engines, by slot: this rank's values are in the owners' boxes, its total is up, it has every
  // total, they are in recv.
  Mark scattered[2], shared[2], gathered[2], stored[2];
};

// A set of lanes is free again once its capture is over: its graph was dropped, or its streams capture no more.
struct Lanes {
  unsigned long long capture = 0;                 // 0: eager
  std::shared_ptr<std::atomic<bool>> graph_gone;  // set by the graph's end; null: eager
  Lane lane[kMaxRanks];
  void forget();  // marks nothing as recorded: a new life
};

struct Owned {
  void* ptr = nullptr;
  int device = -1;      // -1: pinned
  int64_t mapped = 0;   // bytes of a mapped file: registered, not allocated
  bool opened = false;  // another process's, opened by its handle
};

// Memory with one owner count: the communicator, each graph that captured it, the reaper. Never frees by itself (the last
// owner may be a graph's destructor, which may make no runtime call): only the reaper does.
struct Storage {
  std::vector<Owned> all;
  std::vector<Stream> streams;
  std::vector<Event> events;
  std::vector<int> stream_device, event_device;
  std::vector<Mark> ends;  // eager ends to pass before anything is freed
  // Across processes: whoever has opened a rank's memory closes it before its owner frees it. The words are in the board,
  // by rank, of the ranks that have opened (own, others).
  std::vector<uint32_t*> own_left, others_left;
  std::chrono::steady_clock::time_point left{};  // when the own ones were set
};

struct RankInfo {
  bool local = true;
  int device = 0;
  double link_gbs = 0;
  DeviceInfo info{};
};

class Comm : public ar_comm {
 public:
  static int32_t create(const ar_options& options, ar_comm** out, ar_error* e);
  ~Comm();

  int32_t has_path(int32_t path, char* reason, size_t n) const;
  int32_t allreduce(const ar_buffer* bufs, int32_t n, int32_t path, int32_t wire, ar_error* e);
  int32_t prepare(int64_t max_bytes, int32_t path, ar_error* e);
  int32_t wait(int64_t timeout_us, ar_error* e);
  int32_t error(ar_error* e);
  void stats(ar_stats* out);
  int32_t lose(int rank, const char* text);
  int32_t export_peer(int rank, uint8_t* handle, ar_error* e);
  int32_t import_peers(const uint8_t* handles, ar_error* e);
  int32_t check_peers(bool look, ar_error* e);
  int32_t nccl_windows(int64_t bytes, ar_ptr* ptrs, ar_error* e);
  int32_t close(ar_error* e);

  // For the transports.
  int world() const { return world_; }
  const std::vector<int>& locals() const { return locals_; }  // ascending
  bool local(int r) const { return ranks_[static_cast<size_t>(r)].local; }
  bool split() const { return static_cast<int>(locals_.size()) != world_; }
  const RankInfo& rank(int r) const { return ranks_[static_cast<size_t>(r)]; }
  int64_t ring_bytes() const { return ring_bytes_; }
  int64_t chunk_bytes() const { return chunk_bytes_; }
  int blocks() const { return blocks_ != 0 ? blocks_ : kDefaultBlocks; }
  int blocks_asked() const { return blocks_; }  // 0: the transport's own default
  uint32_t first_epoch() const { return first_epoch_; }
  uint64_t timeout_ns() const { return timeout_ns_; }
  // Ranks are on several hosts: nothing but NCCL reaches them.
  bool far() const { return split() && shared_ == nullptr; }
  // The device's view of the board.
  Board* board() const { return board_device_; }
  // What a kernel of this process polls, and what it sets to end the waits of all: `aborts` words from `abort_base` on.
  uint32_t* abort_word() const { return &board_device_->abort[own_abort()].v; }
  uint32_t* abort_base() const { return &board_device_->abort[0].v; }
  int aborts() const { return split() ? world_ : 1; }
  // A rank's signature of a call; without lines where ranks cannot disagree: one process enqueues for all, eagerly or into
  // one graph.
  Signature signature(const Call& call, int path, int rank) const;
  void set_counter(int rank, uint32_t* counter) { counters_[rank] = counter; }
  void note_chunk(int64_t bytes) { last_chunk_ = bytes; }
  void note_allocation() { allocations_++; }
  // Graphs that captured this communicator and are still there. From any thread.
  int graphs() const { return *graphs_; }
  // From the NCCL watchdog's thread: ends every wait; the next call finds out why. running: the ranks (by bit) that had begun.
  void expire_nccl(uint32_t running) {
    nccl_running_ = running;
    nccl_expired_ = true;
    abort_all();
  }

  // Memory of the communicator, owned by its Storage, not cleared.
  // Leaves the rank's device current. Exported: other processes open it (Transport::export_memory).
  int32_t allocate_device(int rank, int64_t bytes, void** out, ar_error* e, bool exported = false);
  // What another process's rank `of` has exported, for a rank of this one; note_opened after the last.
  int32_t open_exported(int rank, int of, const uint8_t* handle, void** out, ar_error* e);
  void note_opened();
  int32_t allocate_pinned(int rank, int64_t bytes, void** host, void** device, ar_error* e);
  // Pinned memory that a rank writes and all read; of a rank of another process the same bytes. `at` is the place among the
  // path's staging of all ranks.
  int32_t staging(int path, int rank, int64_t at, int64_t bytes, void** host, void** device, ar_error* e);
  // Takes back what a failed step allocated after `mark` (a size of Storage::all).
  size_t storage_mark() const { return storage_->all.size(); }
  void storage_rollback(size_t mark);

  // Makes what a lane lacks; the current device must be the rank's.
  int32_t need_stream(Stream& stream, int rank, ar_error* e);
  int32_t need(Mark& mark, int rank, ar_error* e);
  // Records on, or makes wait, a rank's stream.
  int32_t record(Mark& mark, int rank, Stream stream, ar_error* e);
  int32_t await(Order id, int rank, Stream stream, const Mark& mark, ar_error* e);
  // Records a mark that other ranks wait for: what events do inside a process, a flag does for the others. Every process
  // makes the same calls for every rank in the same order; of a rank that is not here nothing is enqueued, but a wait for
  // the mark then waits for the flag that its process raises. A slot's records of one kind must be in stream order.
  int32_t publish(Mark& mark, Told what, int slot, int rank, Stream stream, ar_error* e);
  // Each local rank's signature of a call, on its stream; nothing where ranks cannot disagree.
  int32_t sign(const Call& call, int path, ar_error* e);
  int32_t runtime_error(Code code, int rank, const char* what, ar_error* e) const;

 private:
  Comm();
  int32_t setup(const ar_options& options, ar_error* e);
  int32_t check(const ar_buffer* bufs, int32_t n, int32_t path, int32_t wire, ar_error* e) const;
  int32_t check_buffer(const ar_buffer& b, int rank, ar_error* e) const;
  int32_t look_at_captures(Call& call, ar_error* e);
  int32_t lanes_for(const CaptureInfo& info, int rank, Lane** lane, ar_error* e);
  int32_t copy_alone(Call& call, ar_error* e);
  int32_t begin(Call& call, ar_error* e);
  int32_t end(Call& call, ar_error* e);
  bool ends_passed(ar_error* e);
  void collect_records();
  int32_t latched(ar_error* e);
  // shared.cpp
  int32_t map_board(const ar_options& options, ar_error* e);
  int own_abort() const { return split() ? locals_[0] : 0; }
  void abort_own();
  void abort_all();
  void latch(const ar_error& failure);
  void find_mismatch();
  int closed_peer() const;
  int32_t await_told(Order id, int rank, Stream stream, const Mark& mark, ar_error* e);

  mutable std::mutex mutex_;
  int world_ = 0;
  std::vector<RankInfo> ranks_;
  std::vector<int> locals_;
  int64_t ring_bytes_ = 0, chunk_bytes_ = 0, last_chunk_ = 0;
  int blocks_ = 0;
  uint32_t first_epoch_ = 0;
  uint64_t timeout_ns_ = 0;
  bool noop_ = false;
  std::atomic<bool> nccl_expired_{false};
  std::atomic<uint32_t> nccl_running_{0};
  std::shared_ptr<std::atomic<int>> graphs_ = std::make_shared<std::atomic<int>>(0);
  bool closed_ = false;
  bool failed_ = false;
  ar_error failure_{};
  uint64_t calls_ = 0, allocations_ = 0;
  uint64_t path_calls_[AR_PATHS] = {}, path_bytes_[AR_PATHS] = {};
  Board* board_ = nullptr;                             // host view
  Board* board_device_ = nullptr;                      // device view
  char *shared_ = nullptr, *shared_device_ = nullptr;  // where split: the file
  int64_t shared_bytes_ = 0;
  uint32_t* counters_[kMaxRanks] = {};                               // of signatures
  uint32_t told_[kMaxRanks][static_cast<int>(Told::count)][2] = {};  // records so far
  std::vector<Part> parts_;
  std::shared_ptr<Storage> storage_;
  Lanes eager_;
  std::vector<std::unique_ptr<Lanes>> captures_;
  std::unique_ptr<Transport> transports_[AR_PATHS];
};

// Frees storage of closed communicators that nothing uses any more; returns how many are left.
size_t reap();
void reap_in_background();  // what is still in use is freed by a thread, once it is not
bool passed(const Storage& storage);
void reap_later(std::shared_ptr<Storage> storage);

// The backend's entry points (backend.h); those of communicators are in comm.cpp, the rest in devices.cpp.
int32_t comm_create(const ar_options*, ar_comm**, ar_error*);
int32_t comm_has_path(const ar_comm*, int32_t, char*, size_t);
int32_t allreduce(ar_comm*, const ar_buffer*, int32_t, int32_t, int32_t, ar_error*);
int32_t comm_prepare(ar_comm*, int64_t, int32_t, ar_error*);
int32_t comm_wait(ar_comm*, int64_t, ar_error*);
int32_t comm_error(ar_comm*, ar_error*);
int32_t comm_stats(ar_comm*, ar_stats*);
int32_t comm_close(ar_comm*, ar_error*);
int32_t comm_lose(ar_comm*, int32_t, const char*, ar_error*);
int32_t comm_export_peer(ar_comm*, int32_t, uint8_t*, ar_error*);
int32_t comm_import_peers(ar_comm*, const uint8_t*, ar_error*);
int32_t comm_check_peers(ar_comm*, int32_t, ar_error*);
int32_t comm_nccl_windows(ar_comm*, int64_t, ar_ptr*, ar_error*);
int32_t comm_free(ar_comm*);
int32_t nccl_id(const char* lib, int32_t p2p_disable, uint8_t* id, ar_error* e);  // transports/nccl.cpp

}  // namespace AR_NS
