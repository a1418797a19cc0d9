//go:build !cuda

package tests

import (
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// `go mod vendor` leaves out folders without Go files, csrc among them: vendor_keep.go makes it take them along.
func TestVendoredConsumer(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles the C core again")
	}
	t.Parallel()
	dir := consumer(t)
	run(t, dir, plain, 0, "go", "mod", "vendor")
	vendored := filepath.Join(dir, "vendor", "gpu.example", "allreduce")
	for _, file := range []string{"csrc/api.cpp", "csrc/include/allreduce.h", "internal/core/core_emulated.cpp"} {
		require.FileExists(t, filepath.Join(vendored, file))
	}
	out := run(t, dir, append(plain, "GOFLAGS=-mod=vendor"), 0, "go", "run", ".")
	assert.Contains(t, out, consumerPrints)
}

// Without cgo everything compiles, and the constructor says what is missing.
func TestWithoutCgo(t *testing.T) {
	t.Parallel()
	dir := consumer(t)
	run(t, dir, append(plain, "CGO_ENABLED=0"), 0, "go", "build", "-o", "program", ".")
	out := run(t, dir, nil, 2, filepath.Join(dir, "program"))
	assert.Contains(t, out, "error: allreduce: New: this program was built with CGO_ENABLED=0")
	run(t, dir, append(plain, "CGO_ENABLED=0", "GOOS=darwin"), 0, "go", "build", "-o", "program", ".")
}

// `make install` into a folder of its own, then programs against it: in C with the archive, in C with the shared library,
// and in Go with the archive.
func TestInstalled(t *testing.T) {
	if testing.Short() {
		t.Skip("runs make install")
	}
	archive := filepath.Join(root(t), "build", "liballreduce.a")
	if _, err := os.Stat(archive); err != nil {
		unavailable(t, "%s is not there: run make first", archive)
	}
	pkgConfig := need(t, "pkg-config")
	prefix := filepath.Join(t.TempDir(), "prefix")
	run(t, root(t), []string{"GOFLAGS="}, 0, "make", "install", "PREFIX="+prefix)
	pc, err := filepath.Glob(filepath.Join(prefix, "lib*", "pkgconfig", "allreduce.pc"))
	require.NoError(t, err)
	require.Len(t, pc, 1)
	lib := filepath.Dir(filepath.Dir(pc[0]))
	env := []string{"PKG_CONFIG_PATH=" + filepath.Dir(pc[0])}
	flags := func(args ...string) []string {
		return strings.Fields(run(t, ".", env, 0, pkgConfig, append(args, "allreduce")...))
	}
	compile := func(program string, libs ...string) {
		args := append([]string{"-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "testdata/consumer.c", "-o", program}, flags("--cflags")...)
		run(t, ".", nil, 0, "cc", append(args, libs...)...)
	}
	const prints = "0.1.0 2 4 6 8\n"

	t.Run("C, archive", func(t *testing.T) {
		program := filepath.Join(t.TempDir(), "program")
		static := flags("--static", "--libs")
		for i, flag := range static { // the archive by its name: beside the shared library, -l would take that
			if flag == "-lallreduce" {
				static[i] = filepath.Join(lib, "liballreduce.a")
			}
		}
		compile(program, static...)
		assert.Equal(t, prints, run(t, ".", nil, 0, program))
		assertLinks(t, program, "liballreduce")
	})
	t.Run("C, shared library", func(t *testing.T) {
		program := filepath.Join(t.TempDir(), "program")
		compile(program, flags("--libs")...)
		assert.Equal(t, prints, run(t, ".", []string{"LD_LIBRARY_PATH=" + lib}, 0, program))
		assertLinks(t, program)
	})
	t.Run("Go, archive", func(t *testing.T) {
		if _, err := os.Stat(filepath.Join(lib, "libcudart_static.a")); err != nil {
			unavailable(t, "the installed library has no cuda backend")
		}
		dir := consumer(t)
		run(t, dir, plain, 0, "go", "mod", "vendor") // without build/ beside it: only the installed archive can serve
		run(t, dir, append(plain, "GOFLAGS=-mod=vendor", "CGO_LDFLAGS=-L"+lib), 0, "go", "build", "-tags", "cuda", "-o", "program", ".")
		program := filepath.Join(dir, "program")
		assert.Contains(t, run(t, dir, nil, 0, program), consumerPrints)
		assertLinks(t, program, "liballreduce", "libstdc++")
	})
}

// assertLinks demands that a program needs neither the driver nor a CUDA runtime, nor what else is named, to start.
func assertLinks(t *testing.T, program string, not ...string) {
	t.Helper()
	file, err := elf.Open(program)
	require.NoError(t, err)
	defer file.Close()
	libraries, err := file.ImportedLibraries()
	require.NoError(t, err)
	for _, library := range libraries {
		for _, name := range append(not, "libcuda", "libcudart", "libnvidia", "libnccl") {
			assert.False(t, strings.HasPrefix(library, name), fmt.Sprintf("%s needs %s", program, library))
		}
	}
}
