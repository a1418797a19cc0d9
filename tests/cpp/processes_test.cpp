// One communicator over several processes, at the C API: each child is one rank. On GPUs too (AR_TEST_BACKEND=cuda), and
// with fewer GPUs than ranks: the processes then take turns on one, which is slow but as hard on memory order as any.
// The tests of Join (join_process_test.go) have everything else: rendezvous, deaths, disagreement.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "rig.h"

namespace {

using rig::B;

// A child's end of what it shares with the others.
struct Rank {
  int rank, world, memory, parent;

  // Gives `mine` to all and gets theirs, by rank: also a barrier. The parent only passes on.
  std::vector<uint8_t> exchange(const std::vector<uint8_t>& mine) const {
    std::vector<uint8_t> all(mine.size() * static_cast<size_t>(world));
    if (write(parent, mine.data(), mine.size()) != static_cast<ssize_t>(mine.size())) _exit(3);
    if (recv(parent, all.data(), all.size(), MSG_WAITALL) != static_cast<ssize_t>(all.size())) _exit(4);
    return all;
  }
  void barrier() const { exchange({1}); }
};

constexpr size_t kBarrier = 1;

#define CHILD_OK(call)                                                                                \
  do {                                                                                                \
    const int32_t status_ = (call);                                                                   \
    if (status_ != AR_OK) {                                                                           \
      std::fprintf(stderr, "rank %d: %s: %s\n%s\n", me.rank, #call, e.message, ar_emulated_report()); \
      return 1;                                                                                       \
    }                                                                                                 \
  } while (false)

struct Plan {
  int world;
  std::vector<size_t> exchanges;  // bytes of each, in order
  std::function<int(const Rank&)> child;
};

// Runs the children; 0 if all went well. This process never touches a device: it forks.
void run(const Plan& plan) {
  ar_options o{};
  o.size = sizeof(o);
  o.world = plan.world;
  const int memory = memfd_create("allreduce test", MFD_CLOEXEC);
  ASSERT_EQ(0, ftruncate(memory, ar_shared_bytes(&o)));
  std::vector<pid_t> pids;
  std::vector<int> ends;
  for (int r = 0; r < plan.world; r++) {
    int pair[2];
    ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      for (int end : ends) close(end);
      close(pair[0]);
      _exit(plan.child(Rank{r, plan.world, memory, pair[1]}));
    }
    close(pair[1]);
    pids.push_back(pid);
    ends.push_back(pair[0]);
  }
  bool whole = true;
  for (size_t bytes : plan.exchanges) {
    std::vector<uint8_t> all(bytes * pids.size());
    for (size_t r = 0; r < ends.size() && whole; r++)
      whole = recv(ends[r], all.data() + r * bytes, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
    for (size_t r = 0; r < ends.size() && whole; r++)
      whole = send(ends[r], all.data(), all.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(all.size());
  }
  for (size_t r = 0; r < pids.size(); r++) {
    close(ends[r]);
    int status = 0;
    waitpid(pids[r], &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << ": status " << status;
  }
  EXPECT_TRUE(whole) << "a rank ended early";
  close(memory);
}

// Element i of rank r: exact in every type and sum.
float value(int rank, int64_t i, int turn) { return static_cast<float>((i * 7 + rank * 3 + turn) % 32 - 16); }

int reduce_all(const Rank& me) {
  ar_error e{};
  int devices = me.world;
  if (B == AR_BACKEND_EMULATED) {
    ar_emulated_machine machine;
    ar_emulated_defaults(&machine, me.world);
    for (int a = 0; a < me.world; a++)
      for (int b = 0; b < me.world; b++) machine.peer[a][b] = a != b;
    CHILD_OK(ar_emulated_configure(&machine, 1, &e));
  } else {
    devices = std::min(me.world, rig::device_count());
  }
  std::vector<int32_t> device;
  for (int r = 0; r < me.world; r++) device.push_back(r % devices);
  const int32_t here = me.rank, d = device[static_cast<size_t>(me.rank)];
  ar_options o{};
  o.size = sizeof(o);
  o.backend = B;
  o.world = me.world;
  o.devices = device.data();
  o.peer = 1;
  o.spin_timeout_ms = 60000;
  o.locals = 1;
  o.ranks = &here;
  o.shared_fd = me.memory;
  ar_comm* comm = nullptr;
  CHILD_OK(ar_comm_create(&o, &comm, &e));
  CHILD_OK(ar_comm_prepare(comm, int64_t{1} << 40, AR_PATH_COPY_ENGINE, &e));
  char why[256];
  if (ar_comm_has_path(comm, AR_PATH_PEER, why, sizeof(why))) return 5;  // before the others' memory is opened
  std::vector<uint8_t> handle(AR_PEER_HANDLE_BYTES);
  CHILD_OK(ar_comm_export_peer(comm, me.rank, handle.data(), &e));
  const std::vector<uint8_t> handles = me.exchange(handle);
  CHILD_OK(ar_comm_import_peers(comm, handles.data(), &e));
  if (ar_comm_has_path(comm, AR_PATH_PEER, why, sizeof(why))) return 10;  // before stores were seen to arrive
  me.barrier();
  CHILD_OK(ar_comm_check_peers(comm, 0, &e));
  me.barrier();
  CHILD_OK(ar_comm_check_peers(comm, 1, &e));
  if (!ar_comm_has_path(comm, AR_PATH_PEER, why, sizeof(why))) {
    std::fprintf(stderr, "rank %d: %s\n", me.rank, why);
    return 6;
  }
  me.barrier();

  constexpr int64_t kMost = 700001;
  ar_stream stream = 0;
  ar_ptr buffer = 0;
  CHILD_OK(ar_stream_create(B, d, &stream, &e));
  CHILD_OK(ar_device_malloc(B, d, kMost * 4, &buffer, &e));
  std::vector<float> host(kMost);
  int turn = 0;
  const auto fill = [&](int64_t count) {
    turn++;
    for (int64_t i = 0; i < count; i++) host[static_cast<size_t>(i)] = value(me.rank, i, turn);
    return ar_copy_to_device(B, d, buffer, host.data(), count * 4, &e);
  };
  const auto wrong = [&](int64_t count) -> int64_t {
    if (ar_copy_to_host(B, d, host.data(), buffer, count * 4, &e) != AR_OK) return -1;
    int64_t bad = 0;
    for (int64_t i = 0; i < count; i++) {
      float sum = 0;
      for (int r = 0; r < me.world; r++) sum += value(r, i, turn);
      bad += host[static_cast<size_t>(i)] != sum;
    }
    return bad;
  };
  const auto call = [&](int64_t count, int path, int wire) {
    ar_buffer b{};
    b.send = b.recv = buffer;
    b.count = count;
    b.type = AR_F32;
    b.op = AR_SUM;
    b.stream = stream;
    return ar_allreduce(comm, &b, 1, path, wire, &e);
  };
  for (int path : {AR_PATH_INTERNAL, AR_PATH_PEER, AR_PATH_COPY_ENGINE, AR_PATH_PEER})
    for (int64_t count : {int64_t{1}, int64_t{1000}, int64_t{16385}, int64_t{100003}, kMost})
      for (int wire : {AR_F32, AR_BF16})
        for (int again = 0; again < 3; again++) {
          CHILD_OK(fill(count));
          CHILD_OK(call(count, path, wire));
          CHILD_OK(ar_stream_synchronize(B, d, stream, &e));
          const int64_t bad = wrong(count);
          if (bad == 0) continue;
          std::fprintf(stderr, "rank %d: %s, %lld elements, wire %s, turn %d: %lld wrong\n", me.rank,
                       ar_path_name(path), static_cast<long long>(count), ar_type_name(wire), turn,
                       static_cast<long long>(bad));
          return 7;
        }
  // A graph in each process, replayed; in between an eager call.
  for (int path : {AR_PATH_INTERNAL, AR_PATH_PEER}) {
    constexpr int64_t kCount = 5003;
    ar_graph graph = 0;
    CHILD_OK(ar_capture_begin(B, d, stream, &e));
    CHILD_OK(call(kCount, path, AR_F32));
    CHILD_OK(ar_capture_end(B, d, stream, &graph, &e));
    for (int again = 0; again < 20; again++) {
      CHILD_OK(fill(kCount));
      if (again % 5 == 4)
        CHILD_OK(call(kCount, path, AR_F32));
      else
        CHILD_OK(ar_graph_launch(B, d, graph, stream, &e));
      CHILD_OK(ar_stream_synchronize(B, d, stream, &e));
      if (wrong(kCount) != 0) return 8;
    }
    CHILD_OK(ar_graph_destroy(B, d, graph, &e));
  }
  CHILD_OK(ar_comm_error(comm, &e));
  ar_comm_free(comm);
  CHILD_OK(ar_device_free(B, d, buffer, &e));
  CHILD_OK(ar_stream_destroy(B, d, stream, &e));
  // The memory that the others had open goes when they have closed it.
  for (int i = 0; B == AR_BACKEND_EMULATED && i < 500 && ar_emulated_live_objects() != 0; i++)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (B == AR_BACKEND_EMULATED && ar_emulated_live_objects() != 0) return 9;
  return 0;
}

TEST(Processes, EveryPath) {
  for (int world : {2, 3, 4}) run({world, {AR_PEER_HANDLE_BYTES, kBarrier, kBarrier, kBarrier}, reduce_all});
}

// What rank 1 stores never arrives at rank 0, although the driver opened its memory: rank 0 says so, and nobody else.
int stores_lost(const Rank& me) {
  ar_error e{};
  ar_emulated_machine machine;
  ar_emulated_defaults(&machine, me.world);
  for (int a = 0; a < me.world; a++)
    for (int b = 0; b < me.world; b++) machine.peer[a][b] = a != b;
  CHILD_OK(ar_emulated_configure(&machine, 1, &e));
  if (me.rank == 1) CHILD_OK(ar_emulated_peer_fault(1, 0, AR_PEER_DROPPED));
  const int32_t here = me.rank, devices[] = {0, 1, 2};
  ar_options o{};
  o.size = sizeof(o);
  o.backend = B;
  o.world = me.world;
  o.devices = devices;
  o.peer = 1;
  o.locals = 1;
  o.ranks = &here;
  o.shared_fd = me.memory;
  ar_comm* comm = nullptr;
  CHILD_OK(ar_comm_create(&o, &comm, &e));
  if (ar_comm_check_peers(comm, 0, &e) != AR_ERR_UNSUPPORTED) return 2;  // before memory was opened
  std::vector<uint8_t> handle(AR_PEER_HANDLE_BYTES);
  CHILD_OK(ar_comm_export_peer(comm, me.rank, handle.data(), &e));
  CHILD_OK(ar_comm_import_peers(comm, me.exchange(handle).data(), &e));
  me.barrier();
  CHILD_OK(ar_comm_check_peers(comm, 0, &e));
  me.barrier();
  const int32_t s = ar_comm_check_peers(comm, 1, &e);
  char why[256] = "";
  const int has = ar_comm_has_path(comm, AR_PATH_PEER, why, sizeof(why));
  if (me.rank != 0) return s == AR_OK && has ? 0 : 3;
  if (s != AR_ERR_UNSUPPORTED || has || e.rank != 0) return 4;
  if (std::strstr(e.message, "what rank 1 stores in the memory of rank 0 does not arrive") == nullptr) return 5;
  if (std::strcmp(why, e.message) != 0) return 6;
  ar_comm_free(comm);
  return 0;
}

TEST(Processes, StoresThatDoNotArrive) {
  if (B != AR_BACKEND_EMULATED) GTEST_SKIP() << "a fault of emulated devices";
  for (int world : {2, 3}) run({world, {AR_PEER_HANDLE_BYTES, kBarrier, kBarrier}, stores_lost});
}

// Handles that nothing is behind.
int refuse(const Rank& me) {
  if (me.rank != 0) return 0;
  ar_error e{};
  if (B == AR_BACKEND_EMULATED) {
    ar_emulated_machine machine;
    ar_emulated_defaults(&machine, 2);
    machine.peer[0][1] = machine.peer[1][0] = 1;
    CHILD_OK(ar_emulated_configure(&machine, 1, &e));
  }
  const int32_t here = 0, devices[] = {0, 0};
  ar_options o{};
  o.size = sizeof(o);
  o.backend = B;
  o.world = 2;
  o.devices = devices;
  o.peer = 1;
  o.locals = 1;
  o.ranks = &here;
  o.shared_fd = me.memory;
  ar_comm* comm = nullptr;
  CHILD_OK(ar_comm_create(&o, &comm, &e));
  std::vector<uint8_t> handles(2 * AR_PEER_HANDLE_BYTES);
  CHILD_OK(ar_comm_export_peer(comm, 0, handles.data(), &e));
  if (ar_comm_export_peer(comm, 1, handles.data(), &e) != AR_ERR_ARGUMENT) return 2;
  if (ar_comm_import_peers(comm, handles.data(), &e) != AR_ERR_ARGUMENT) return 3;  // zeros
  std::memcpy(handles.data() + AR_PEER_HANDLE_BYTES, handles.data(), AR_PEER_HANDLE_BYTES);
  // A process cannot open its own.
  if (ar_comm_import_peers(comm, handles.data(), &e) != AR_ERR_UNSUPPORTED) return 4;
  char why[256];
  if (ar_comm_has_path(comm, AR_PATH_PEER, why, sizeof(why)) || std::strstr(why, "cannot open") == nullptr) return 5;
  ar_comm_free(comm);
  return 0;
}

TEST(Processes, WrongHandles) { run({2, {}, refuse}); }

}  // namespace
