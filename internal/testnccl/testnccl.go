// Package testnccl builds the emulated NCCL (csrc/emulated/libnccl) for tests, as it should be or with a fault.
package testnccl

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
)

// Build compiles the library with extra compiler flags, "-DAR_NCCL_VERSION=21700" say, and gives its path. It skips where
// there is no C++ compiler or no source tree (the GPU bundle), and where only GPUs are tested: they never use it.
func Build(t testing.TB, flags ...string) string {
	t.Helper()
	if os.Getenv("AR_TEST_BACKEND") == "cuda" {
		t.Skip("the emulated NCCL serves emulated devices only, and AR_TEST_BACKEND=cuda")
	}
	compiler, err := exec.LookPath("g++")
	if err != nil {
		t.Skip("no g++ to build the emulated NCCL with")
	}
	_, file, _, _ := runtime.Caller(0)
	root := filepath.Dir(filepath.Dir(filepath.Dir(file)))
	source := filepath.Join(root, "csrc", "emulated", "libnccl", "nccl.cpp")
	if _, err := os.Stat(source); err != nil {
		t.Skip("no source tree to build the emulated NCCL from")
	}
	out := filepath.Join(t.TempDir(), "libnccl-emulated.so")
	args := append([]string{"-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-o", out,
		source}, flags...)
	if text, err := exec.Command(compiler, args...).CombinedOutput(); err != nil {
		t.Fatalf("building the emulated NCCL: %v\n%s", err, text)
	}
	return out
}
