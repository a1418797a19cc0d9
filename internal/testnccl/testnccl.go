// Package testnccl builds the emulated NCCL (csrc/emulated/libnccl) for tests, as it should be or with a fault.
package testnccl

import (
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
)

// Build compiles the library with extra compiler flags, "-DAR_NCCL_VERSION=21700" say, and gives its path. A machine
// without a C++ compiler (the GPU bundle's) skips.
func Build(t testing.TB, flags ...string) string {
	t.Helper()
	compiler, err := exec.LookPath("g++")
	if err != nil {
		t.Skip("no g++ to build the emulated NCCL with")
	}
	_, file, _, _ := runtime.Caller(0)
	root := filepath.Dir(filepath.Dir(filepath.Dir(file)))
	out := filepath.Join(t.TempDir(), "libnccl-emulated.so")
	args := append([]string{"-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-o", out,
		filepath.Join(root, "csrc", "emulated", "libnccl", "nccl.cpp")}, flags...)
	if text, err := exec.Command(compiler, args...).CombinedOutput(); err != nil {
		t.Fatalf("building the emulated NCCL: %v\n%s", err, text)
	}
	return out
}
