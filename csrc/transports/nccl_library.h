// Opening libnccl at run time. A library once opened stays: NCCL has threads of its own.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "nccl_api.h"

namespace ar {
namespace nccl {

struct Library {
  Api api{};
  int version = 0;
  std::string path;
  std::string missing;  // why it cannot be used, "" if it can
};

inline std::string version_text(int v) {
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

// What emulated devices offer an emulated NCCL (csrc/emulated/nccl.h); its bind function also tells the two kinds apart.
constexpr const char* kBindSymbol = "ar_emulated_nccl_bind";

inline void open(const std::string& path, bool simulated, const void* host, Library* lib) {
  lib->path = path;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    lib->missing = std::string("no NCCL: ") + (why != nullptr ? why : path.c_str());
    return;
  }
  auto bind = reinterpret_cast<void (*)(const void*)>(dlsym(handle, kBindSymbol));
  if (simulated && bind == nullptr) {
    lib->missing = path + " is a real NCCL: emulated devices need the emulated one (build/libnccl-emulated.so)";
    return;
  }
  if (!simulated && bind != nullptr) {
    lib->missing = path + " is the emulated NCCL: it serves emulated devices only";
    return;
  }
  const struct {
    const char* name;
    void** slot;
  } symbols[] = {
      {"ncclGetVersion", reinterpret_cast<void**>(&lib->api.GetVersion)},
      {"ncclGetUniqueId", reinterpret_cast<void**>(&lib->api.GetUniqueId)},
      {"ncclCommInitRankConfig", reinterpret_cast<void**>(&lib->api.CommInitRankConfig)},
      {"ncclCommDestroy", reinterpret_cast<void**>(&lib->api.CommDestroy)},
      {"ncclCommAbort", reinterpret_cast<void**>(&lib->api.CommAbort)},
      {"ncclCommGetAsyncError", reinterpret_cast<void**>(&lib->api.CommGetAsyncError)},
      {"ncclGetErrorString", reinterpret_cast<void**>(&lib->api.GetErrorString)},
      {"ncclGetLastError", reinterpret_cast<void**>(&lib->api.GetLastError)},
      {"ncclAllReduce", reinterpret_cast<void**>(&lib->api.AllReduce)},
      {"ncclGroupStart", reinterpret_cast<void**>(&lib->api.GroupStart)},
      {"ncclGroupEnd", reinterpret_cast<void**>(&lib->api.GroupEnd)},
  };
  // The version first: an old library lacks symbols, and its age is the better reason.
  *symbols[0].slot = dlsym(handle, symbols[0].name);
  if (lib->api.GetVersion == nullptr || lib->api.GetVersion(&lib->version) != kSuccess) {
    lib->missing = path + " has no working ncclGetVersion: it is no NCCL";
    return;
  }
  if (lib->version < kOldest) {
    lib->missing = path + " is NCCL " + version_text(lib->version) + ": 2.18.0 or later is needed";
    return;
  }
  for (const auto& s : symbols) {
    *s.slot = dlsym(handle, s.name);
    if (*s.slot == nullptr) {
      lib->missing = path + " (NCCL " + version_text(lib->version) + ") lacks " + s.name;
      return;
    }
  }
  if (bind != nullptr) bind(host);
}

// The library at `path`, opened once. A path that failed is tried again by the next communicator.
// p2p_disable: NCCL must not use peer access here. It reads NCCL_P2P_DISABLE once, so that is set before the first call,
// and a library that the host program (or an earlier communicator) may have used without it is refused.
inline Library find(const std::string& path, bool simulated, const void* host, bool p2p_disable) {
  static std::mutex mutex;
  static auto* opened = new std::map<std::string, Library>;
  static auto* disabled = new std::map<std::string, bool>;
  std::lock_guard<std::mutex> lock(mutex);
  const char* set = std::getenv("NCCL_P2P_DISABLE");
  const bool already = set != nullptr && std::string(set) == "1";
  auto it = opened->find(path);
  if (p2p_disable && !already) {
    const bool ours_without = it != opened->end() && !(*disabled)[path];
    void* foreign = it == opened->end() ? dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD) : nullptr;
    if (foreign != nullptr) dlclose(foreign);
    if (ours_without || foreign != nullptr) {
      Library refused;
      refused.path = path;
      refused.missing =
          path +
          " was already in use in this process without NCCL_P2P_DISABLE=1, which this machine's peer access "
          "needs: set it before the program starts";
      return refused;
    }
    setenv("NCCL_P2P_DISABLE", "1", 1);
  }
  if (it != opened->end()) return it->second;
  Library lib;
  open(path, simulated, host, &lib);
  if (lib.missing.empty()) {
    (*opened)[path] = lib;
    (*disabled)[path] = p2p_disable || already;
  }
  return lib;
}

}  // namespace nccl
}  // namespace ar
