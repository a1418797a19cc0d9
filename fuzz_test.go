package allreduce

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu.example/allreduce/internal/testfuzz"
)

// printed writes what a variable was read as, in the form its parser takes; every row of the table has its line.
var printed = map[string]func(s *settings) string{
	"GGML_CUDA_ALLREDUCE":           func(s *settings) string { return spelled(algorithmNames, s.algorithm) },
	"GGML_CUDA_AR_CE":               func(s *settings) string { return strconv.FormatBool(s.ce) },
	"GGML_CUDA_AR_CE_MIN_BYTES":     func(s *settings) string { return FormatBytes(s.ceMinBytes) },
	"GGML_CUDA_AR_PREFER":           func(s *settings) string { return spelled(preferNames, s.prefer) },
	"GGML_CUDA_AR_NCCL_MIN_BYTES":   func(s *settings) string { return FormatBytes(s.ncclMinBytes) },
	"GGML_CUDA_AR_BF16_THRESHOLD":   func(s *settings) string { return FormatBytes(max(s.bf16Threshold, 0)) },
	"GGML_CUDA_AR_WIRE":             func(s *settings) string { return spelled(wireNames, s.wire) },
	"GGML_CUDA_AR_PEER_MIN_BYTES":   func(s *settings) string { return FormatBytes(s.peerMinBytes) },
	"GGML_CUDA_AR_PEER_MAX_BYTES":   func(s *settings) string { return FormatBytes(s.peerMaxBytes) },
	"GGML_CUDA_AR_COPY_CHUNK_BYTES": func(s *settings) string { return FormatBytes(s.copyChunkBytes) },
	"GGML_CUDA_AR_RING_BYTES":       func(s *settings) string { return FormatBytes(s.ringBytes) },
	"GGML_CUDA_AR_BLOCKS":           func(s *settings) string { return strconv.Itoa(s.blocks) },
	"GGML_CUDA_AR_EMULATED":         func(s *settings) string { return s.emulated },
	"GGML_CUDA_AR_SPIN_TIMEOUT_MS":  func(s *settings) string { return fmt.Sprint(int64(s.spinTimeout / time.Millisecond)) },
	"GGML_CUDA_P2P":                 func(s *settings) string { return spelled(p2pNames, s.p2p) },
	"GGML_CUDA_AR_TRACE":            func(s *settings) string { return strconv.Itoa(s.trace) },
	"GGML_CUDA_AR_NOOP":             func(s *settings) string { return strconv.FormatBool(s.noop) },
	"GGML_CUDA_AR_RENDEZVOUS":       func(s *settings) string { return s.rendezvous },
	"GGML_CUDA_AR_SECRET_FILE":      func(s *settings) string { return s.secretFile },
	"GGML_CUDA_AR_CACHE_DIR":        func(s *settings) string { return s.cacheDir },
	"GGML_CUDA_NCCL_LIB":            func(s *settings) string { return s.ncclLib },
	"NCCL_P2P_DISABLE": func(s *settings) string {
		if s.ncclP2PDisable {
			return "1"
		}
		return "0"
	},
}

func spelled[T comparable](names []spelling[T], value T) string {
	for _, n := range names {
		if n.value == value {
			return n.text
		}
	}
	return "?"
}

// One variable with any value: it is refused in one line that names it, or read as something that reads the same again.
func FuzzVariable(f *testing.F) {
	for row, v := range variables {
		for _, value := range []string{v.Default, "0", "1", "off", "512K", "1M", "18446744073709551615G", "1_0", " 1", "auto", "a\nb", "\xff"} {
			f.Add(uint8(row), value)
		}
	}
	f.Fuzz(func(t *testing.T, row uint8, value string) {
		v := &variables[int(row)%len(variables)]
		if value == "" { // counts as not set
			return
		}
		testfuzz.Bounded(t, len(value), func() {
			s, warnings, err := loadSettings(Config{}, []string{v.Name + "=" + value})
			if err != nil {
				if !errors.Is(err, ErrSetting) {
					t.Fatalf("not ErrSetting: %v", err)
				}
				testfuzz.OneLine(t, err, 0, v.Name, "allowed")
				return
			}
			for _, w := range warnings {
				testfuzz.OneLine(t, errors.New(w), 0)
			}
			back, _, err := loadSettings(Config{}, []string{v.Name + "=" + printed[v.Name](&s)})
			if err != nil || !reflect.DeepEqual(s, back) {
				t.Fatalf("%s=%q is read as %q, and that as %+v (%v), not %+v", v.Name, value, printed[v.Name](&s), back, err, s)
			}
		})
	})
}

// Any environment: settings in range or one error, and nothing that is said has more than one line.
func FuzzEnvironment(f *testing.F) {
	f.Add("GGML_CUDA_AR_RING_BYTES=1M\x00GGML_CUDA_AR_COPY_CHUNK_BYTES=1M")
	f.Add("GGML_CUDA_AR_PEER_MIN_BYTES=2\x00GGML_CUDA_AR_PEER_MAX_BYTES=1")
	f.Add("GGML_CUDA_AR_COPY_TRESHOLD=1\x00GGML_CUDA_AR_\n=x\x00=\x00a")
	f.Add("XDG_CACHE_HOME=/c\x00HOME=/h\x00GGML_CUDA_AR_CE=1\x00GGML_CUDA_AR_CE=maybe")
	f.Fuzz(func(t *testing.T, block string) {
		testfuzz.Bounded(t, len(block), func() {
			s, warnings, err := loadSettings(Config{}, strings.Split(block, "\x00"))
			inRange := s.ceMinBytes >= 1 && s.ringBytes >= minRingBytes && s.ringBytes <= maxRingBytes && s.copyChunkBytes <= s.ringBytes/2 &&
				s.spinTimeout >= minSpinTimeout && s.spinTimeout <= maxSpinTimeout && s.blocks >= 0 && s.blocks <= maxBlocks
			if err != nil {
				testfuzz.OneLine(t, err, 0, "allowed")
			} else if !inRange {
				t.Fatalf("%q gives %+v", block, s)
			}
			for _, w := range warnings {
				testfuzz.OneLine(t, errors.New(w), 0)
			}
		})
	})
}

// A byte count is refused in one line, or written and read back as itself.
func FuzzParseBytes(f *testing.F) {
	for _, text := range []string{"", "0", "1", "512K", "3m", "8G", "9223372036854775807", "8589934592G", "-1", "1KB", "0x1", "1_000", "K"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		testfuzz.Bounded(t, len(text), func() {
			n, err := ParseBytes(text)
			if err != nil {
				if !errors.Is(err, ErrArgument) {
					t.Fatalf("not ErrArgument: %v", err)
				}
				testfuzz.OneLine(t, err, 0, fmt.Sprintf("%.80q", text))
				return
			}
			if back, err := ParseBytes(FormatBytes(n)); n < 0 || err != nil || back != n {
				t.Fatalf("%q is %d, written %q, and that is %d (%v)", text, n, FormatBytes(n), back, err)
			}
		})
	})
}

// A type's name is refused in one line, or is what String gives.
func FuzzParseType(f *testing.F) {
	for _, text := range []string{"f32", "bf16", "u8", "F32", "none", "\n"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		typ, err := ParseType(text)
		if err != nil {
			testfuzz.OneLine(t, err, len(text), "allowed")
		} else if typ.String() != text {
			t.Fatalf("%q is read as %s", text, typ)
		}
	})
}

// Every row of the table is fuzzed.
func TestFuzzKnowsEveryVariable(t *testing.T) {
	for _, v := range variables {
		if printed[v.Name] == nil {
			t.Errorf("fuzz_test.go cannot print %s", v.Name)
		}
	}
}
