// Device memory that several processes have, as CUDA's IPC handles give it. Here a handle names a file without a name
// (memfd) of the exporting process, which whoever may look into that process's descriptors can map.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

#include "world.h"

namespace AR_NS {

namespace {
constexpr uint64_t kIpcMagic = 0x6172656d75697063;
struct IpcHandle {
  uint64_t magic;
  int64_t bytes;
  int32_t pid, fd, device;
};
static_assert(sizeof(IpcHandle) <= ar::kIpcBytes, "a handle travels in so many bytes");

void* map(int fd, size_t bytes) { return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); }

// The file behind a handle, -1 where there is none of that size any more.
int open_file(const IpcHandle& h) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", h.pid, h.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  struct stat st;
  if (fd >= 0 && (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < h.bytes)) {
    close(fd);
    return -1;
  }
  return fd;
}
}  // namespace

Code malloc_exported(void** p, size_t bytes) {
  *p = nullptr;
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_MALLOC_DEVICE)) return kMemory;
  const int device = current_device(w);
  Device& d = w.devices[static_cast<size_t>(device)];
  if (bytes == 0 || bytes > static_cast<size_t>(d.spec.memory_bytes - d.used_bytes)) return kMemory;
  const int fd = memfd_create("emulated device memory", MFD_CLOEXEC);
  void* q = fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? map(fd, bytes) : MAP_FAILED;
  if (q == MAP_FAILED) {
    if (fd >= 0) close(fd);
    return kMemory;
  }
  Allocation a;
  a.origin = Origin::exported;
  a.kind = MemoryKind::device;
  a.device = device;
  a.fd = fd;
  w.adopt(q, bytes, std::move(a));
  d.used_bytes += static_cast<int64_t>(bytes);
  *p = q;
  return kOk;
}

Code ipc_export(void* p, uint8_t* handle) {
  Guard g;
  const Allocation* a = g.w.find(p, 1);
  if (a == nullptr || a->origin != Origin::exported || a->base != reinterpret_cast<uintptr_t>(p)) return kInvalidValue;
  const IpcHandle h{kIpcMagic, static_cast<int64_t>(a->bytes), getpid(), a->fd, a->device};
  std::memset(handle, 0, ar::kIpcBytes);
  std::memcpy(handle, &h, sizeof(h));
  return kOk;
}

Code ipc_open(void** p, const uint8_t* handle) {
  *p = nullptr;
  IpcHandle h;
  std::memcpy(&h, handle, sizeof(h));
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_IPC_OPEN)) return kInjectedFault;
  // As with CUDA, a process cannot open its own.
  if (h.magic != kIpcMagic || h.pid == getpid() || h.bytes <= 0 || h.device < 0 || h.device >= w.machine.devices)
    return kInvalidValue;
  const int device = current_device(w);
  if (device != h.device && !w.machine.peer[device][h.device]) return kPeerUnsupported;
  const int fd = open_file(h);
  if (fd < 0) return kInvalidValue;
  void* q = map(fd, static_cast<size_t>(h.bytes));
  close(fd);
  if (q == MAP_FAILED) return kMemory;
  Allocation a;
  a.origin = Origin::imported;
  a.kind = MemoryKind::device;
  a.device = h.device;
  w.adopt(q, static_cast<size_t>(h.bytes), std::move(a));
  w.peer_enabled[device][h.device] = true;
  *p = q;
  return kOk;
}

Code ipc_close(void* p) { return free_memory(p, MemoryKind::device, Origin::imported); }

}  // namespace AR_NS
