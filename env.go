package allreduce

// Every environment variable the library reads is one row of the table below: name, default, what is allowed, help, the
// Config field that overrides it, and both parsers. Nothing else in the module reads a setting from the environment;
// the documentation and `allreduce doctor` print from Variables().

import (
	"fmt"
	"log/slog"
	"math"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpu.example/allreduce/internal/core"
)

// Limits of the settings, as the table states them.
const (
	maxRanks = 8

	defaultCEMinBytes = 512 << 10
	defaultRingBytes  = 8 << 20
	minRingBytes      = 1 << 20
	maxRingBytes      = 256 << 20
	minChunkBytes     = 64 << 10
	maxBlocks         = 128
	maxTrace          = 1_000_000_000

	defaultSpinTimeout = 10 * time.Second
	minSpinTimeout     = time.Millisecond
	maxSpinTimeout     = time.Hour

	variablePrefix = "GGML_CUDA_AR_"
)

// Variable describes one environment variable.
type Variable struct {
	Name    string
	Default string // as it would be written, or in words
	Allowed string // the values, or the range
	Help    string // one sentence
	Field   string // the Config field that wins over it, "" where there is none
	NotYet  string // what it waits for; "" if it works
}

// settings is what a communicator is made with: the Config over the variables over the defaults, in range, plain.
type settings struct {
	backend Backend
	ranks   int   // 0: as many as there are devices
	devices []int // of each rank; nil: rank i on device i
	logger  *slog.Logger
	// logStderr: TRACE or NOOP comes from the environment and there is no Logger, so their lines go to standard error.
	logStderr bool

	algorithm     Algorithm // never AlgorithmUnset
	ce            bool
	ceMinBytes    int64
	ceMinSet      bool   // given, not the default: PREFER=latency then leaves it alone
	prefer        Prefer // never PreferUnset
	ncclMinBytes  int64  // 0: no such border
	bf16Threshold int64  // 0: not set; BF16Never
	wire          WireChoice
	peerMinBytes  int64 // -1: as measured
	peerMaxBytes  int64 // 0: as measured

	copyChunkBytes int64 // 0: by link
	ringBytes      int64
	blocks         int // 0: measured
	spinTimeout    time.Duration
	emulated       string

	p2p            P2PMode // never P2PUnset
	ncclP2PDisable bool
	trace          int
	noop           bool

	rendezvous    string
	secretFile    string
	cacheDir      string // "" where there is no home either
	cacheDirGiven bool   // emulated devices use a cache only where one was given
	ncclLib       string
	probeCommand  string
}

// variable is one row: parse reads the variable's value, field the Config's (given is nil where it is not set). Both
// say false for what is not allowed.
type variable struct {
	Variable
	parse func(s *settings, value string) bool
	field func(s *settings, c *Config) (given any, ok bool)
}

const (
	allowedBool  = "0, 1, true, false, on, off"
	allowedBytes = "a byte count, K, M or G for 1024, 1024^2, 1024^3"
)

var variables = []variable{
	{Variable{Name: "GGML_CUDA_ALLREDUCE", Default: "auto", Field: "Algorithm",
		Allowed: "auto, internal, ce, copy-engine, peer, nccl, none",
		Help:    "Which path: auto decides by size, type and machine; none: AllReduce returns ErrDisabled and the caller reduces."},
		func(s *settings, v string) bool { return pick(algorithmNames, v, &s.algorithm) },
		func(s *settings, c *Config) (any, bool) {
			return choose(algorithmNames, c.Algorithm, &s.algorithm)
		}},
	{Variable{Name: "GGML_CUDA_AR_CE", Default: "1", Field: "CopyEngine", Allowed: allowedBool,
		Help: "0: no copy engines; large reductions go to NCCL, without NCCL to internal."},
		func(s *settings, v string) bool { return parseBool(v, &s.ce) },
		func(s *settings, c *Config) (any, bool) { return switched(c.CopyEngine, &s.ce) }},
	{Variable{Name: "GGML_CUDA_AR_CE_MIN_BYTES", Default: "512K", Field: "CEMinBytes", Allowed: "1 and up, " + allowedBytes,
		Help: "From this payload on the copy engines serve; 1: every reduction that is not another path's by an earlier rule."},
		func(s *settings, v string) bool {
			s.ceMinSet = true
			return parseBytesIn(v, 1, math.MaxInt64, &s.ceMinBytes)
		},
		func(s *settings, c *Config) (any, bool) {
			s.ceMinSet = s.ceMinSet || c.CEMinBytes != 0
			return bytesIn(c.CEMinBytes, 1, math.MaxInt64, &s.ceMinBytes)
		}},
	{Variable{Name: "GGML_CUDA_AR_PREFER", Default: "overlap", Field: "Prefer", Allowed: "overlap, latency",
		Help: "overlap: keep the SMs free from 512 KiB on; latency: whatever was measured fastest alone (moves the border above unless that is set)."},
		func(s *settings, v string) bool { return pick(preferNames, v, &s.prefer) },
		func(s *settings, c *Config) (any, bool) { return choose(preferNames, c.Prefer, &s.prefer) }},
	{Variable{Name: "GGML_CUDA_AR_NCCL_MIN_BYTES", Default: "unset", Field: "NCCLMinBytes", Allowed: "1 and up, " + allowedBytes,
		Help: "From this payload on NCCL serves where it exists; changes nothing below."},
		func(s *settings, v string) bool { return parseBytesIn(v, 1, math.MaxInt64, &s.ncclMinBytes) },
		func(s *settings, c *Config) (any, bool) {
			return bytesIn(c.NCCLMinBytes, 1, math.MaxInt64, &s.ncclMinBytes)
		}},
	{Variable{Name: "GGML_CUDA_AR_BF16_THRESHOLD", Default: "unset", Field: "BF16Threshold", Allowed: "0 (never) and up, " + allowedBytes,
		Help: "F32 payloads of at least this size travel as BF16, on every path; 0: exact F32 everywhere; unset: copy-engine always, nccl from 512K, internal and peer never."},
		func(s *settings, v string) bool {
			ok := parseBytesIn(v, 0, math.MaxInt64, &s.bf16Threshold)
			if s.bf16Threshold == 0 {
				s.bf16Threshold = BF16Never
			}
			return ok
		},
		func(s *settings, c *Config) (any, bool) {
			return bytesIn(c.BF16Threshold, BF16Never, math.MaxInt64, &s.bf16Threshold)
		}},
	{Variable{Name: "GGML_CUDA_AR_WIRE", Default: "auto", Field: "Wire", Allowed: "auto, f32, bf16, f16",
		Help: "The wire of F32 payloads on every path; auto: GGML_CUDA_AR_BF16_THRESHOLD decides."},
		func(s *settings, v string) bool { return pick(wireNames, v, &s.wire) },
		func(s *settings, c *Config) (any, bool) { return choose(wireNames, c.Wire, &s.wire) }},
	{Variable{Name: "GGML_CUDA_AR_PEER_MIN_BYTES", Default: "measured", Field: "PeerMinBytes", Allowed: "0 and up, " + allowedBytes,
		Help: "The smallest payload of the peer path, where peer access is proven."},
		func(s *settings, v string) bool { return parseBytesIn(v, 0, math.MaxInt64, &s.peerMinBytes) },
		func(s *settings, c *Config) (any, bool) {
			return bytesIn(c.PeerMinBytes, 1, math.MaxInt64, &s.peerMinBytes)
		}},
	{Variable{Name: "GGML_CUDA_AR_PEER_MAX_BYTES", Default: "measured", Field: "PeerMaxBytes", Allowed: "1 and up, not below GGML_CUDA_AR_PEER_MIN_BYTES, " + allowedBytes,
		Help: "The largest payload of the peer path, where peer access is proven."},
		func(s *settings, v string) bool { return parseBytesIn(v, 1, math.MaxInt64, &s.peerMaxBytes) },
		func(s *settings, c *Config) (any, bool) {
			return bytesIn(c.PeerMaxBytes, 1, math.MaxInt64, &s.peerMaxBytes)
		}},
	{Variable{Name: "GGML_CUDA_AR_COPY_CHUNK_BYTES", Default: "0", Field: "CopyChunkBytes",
		Allowed: "0 (by the link's rate) or 64K to half of GGML_CUDA_AR_RING_BYTES, " + allowedBytes,
		Help:    "The size of one copy of the copy engines, on the wire."},
		func(s *settings, v string) bool {
			return parseBytesIn(v, 0, maxRingBytes/2, &s.copyChunkBytes) && (s.copyChunkBytes == 0 || s.copyChunkBytes >= minChunkBytes)
		},
		func(s *settings, c *Config) (any, bool) {
			if c.CopyChunkBytes == ChunkByLink {
				s.copyChunkBytes = 0
				return c.CopyChunkBytes, true
			}
			return bytesIn(c.CopyChunkBytes, minChunkBytes, maxRingBytes/2, &s.copyChunkBytes)
		}},
	{Variable{Name: "GGML_CUDA_AR_RING_BYTES", Default: "8M", Field: "RingBytes", Allowed: "1M to 256M, " + allowedBytes,
		Help: "The pinned ring of the copy engines per GPU; it should fit the processor's last-level cache."},
		func(s *settings, v string) bool { return parseBytesIn(v, minRingBytes, maxRingBytes, &s.ringBytes) },
		func(s *settings, c *Config) (any, bool) {
			return bytesIn(c.RingBytes, minRingBytes, maxRingBytes, &s.ringBytes)
		}},
	{Variable{Name: "GGML_CUDA_AR_BLOCKS", Default: "0", Field: "Blocks", Allowed: "0 (as measured) to 128",
		Help: "The number of blocks of the internal and peer kernels."},
		func(s *settings, v string) bool { return parseIntIn(v, 0, maxBlocks, &s.blocks) },
		func(s *settings, c *Config) (any, bool) {
			if c.Blocks == BlocksMeasured {
				s.blocks = 0
				return c.Blocks, true
			}
			return intIn(c.Blocks, 1, maxBlocks, &s.blocks)
		}},
	{Variable{Name: "GGML_CUDA_AR_EMULATED", Default: "as many devices as ranks, PCIe 5 x16, no peer access", Field: "Emulated", Allowed: "a file's path",
		Help: "The file that describes the emulated machine: devices, rates per direction, uplinks, peer access."},
		func(s *settings, v string) bool { return parseText(v, &s.emulated) },
		func(s *settings, c *Config) (any, bool) { return textField(c.Emulated, &s.emulated) }},
	{Variable{Name: "GGML_CUDA_AR_SPIN_TIMEOUT_MS", Default: "10000", Field: "SpinTimeout", Allowed: "1 to 3600000 (milliseconds)",
		Help: "The deadline of every wait on a device, counted from when the wait starts there."},
		func(s *settings, v string) bool {
			var ms int
			ok := parseIntIn(v, 1, int(maxSpinTimeout/time.Millisecond), &ms)
			s.spinTimeout = time.Duration(ms) * time.Millisecond
			return ok
		},
		func(s *settings, c *Config) (any, bool) {
			if c.SpinTimeout == 0 {
				return nil, true
			}
			s.spinTimeout = c.SpinTimeout
			return c.SpinTimeout, c.SpinTimeout >= minSpinTimeout && c.SpinTimeout <= maxSpinTimeout
		}},
	{Variable{Name: "GGML_CUDA_P2P", Default: "auto", Field: "P2P", Allowed: "auto, " + allowedBool,
		Help: "Peer access: auto: only if proven; 0: never; 1: trust the driver, with a warning."},
		func(s *settings, v string) bool {
			var trust bool
			if v == "auto" {
				s.p2p = P2PAuto
				return true
			}
			ok := parseBool(v, &trust)
			s.p2p = P2POff
			if trust {
				s.p2p = P2PTrust
			}
			return ok
		},
		func(s *settings, c *Config) (any, bool) { return choose(p2pNames, c.P2P, &s.p2p) }},
	{Variable{Name: "GGML_CUDA_AR_TRACE", Default: "0", Field: "Trace", Allowed: "0 (none) to 1000000000",
		Help: "Log the first so many reductions: path, reason, bytes, chunks (a captured one once, at capture)."},
		func(s *settings, v string) bool {
			ok := parseIntIn(v, 0, maxTrace, &s.trace)
			s.logStderr = s.logStderr || s.trace > 0
			return ok
		},
		func(s *settings, c *Config) (any, bool) {
			if c.Trace == TraceNone {
				s.trace = 0
				return c.Trace, true
			}
			return intIn(c.Trace, 1, maxTrace, &s.trace)
		}},
	{Variable{Name: "GGML_CUDA_AR_NOOP", Default: "0", Field: "NoOp", Allowed: allowedBool,
		Help: "1: route but move nothing, to measure a program's ceiling; results are wrong on purpose, and a warning says so."},
		func(s *settings, v string) bool {
			ok := parseBool(v, &s.noop)
			s.logStderr = s.logStderr || s.noop
			return ok
		},
		func(s *settings, c *Config) (any, bool) { return switched(c.NoOp, &s.noop) }},
	{Variable{Name: "GGML_CUDA_AR_RENDEZVOUS", Default: "unset", Field: "Rendezvous", Allowed: "host:port, or a job's name",
		Help: "Where the ranks of several processes meet: host:port for several hosts, a job name on one."},
		func(s *settings, v string) bool { return parseText(v, &s.rendezvous) },
		func(s *settings, c *Config) (any, bool) { return textField(c.Rendezvous, &s.rendezvous) }},
	{Variable{Name: "GGML_CUDA_AR_SECRET_FILE", Default: "unset", Field: "SecretFile", Allowed: "a file's path",
		Help: "The file with the shared secret of a TCP rendezvous."},
		func(s *settings, v string) bool { return parseText(v, &s.secretFile) },
		func(s *settings, c *Config) (any, bool) { return textField(c.SecretFile, &s.secretFile) }},
	{Variable{Name: "GGML_CUDA_AR_CACHE_DIR", Default: "$XDG_CACHE_HOME/allreduce", Field: "CacheDir", Allowed: "a folder's path",
		Help: "The folder of the peer-access verdicts and of the machine file."},
		func(s *settings, v string) bool { s.cacheDirGiven = true; return parseText(v, &s.cacheDir) },
		func(s *settings, c *Config) (any, bool) {
			s.cacheDirGiven = s.cacheDirGiven || c.CacheDir != ""
			return textField(c.CacheDir, &s.cacheDir)
		}},
	{Variable{Name: "GGML_CUDA_NCCL_LIB", Default: "libnccl.so.2", Field: "NCCLLib", Allowed: "a library's name or path",
		Help: "Which NCCL to open."},
		func(s *settings, v string) bool { return parseText(v, &s.ncclLib) },
		func(s *settings, c *Config) (any, bool) { return textField(c.NCCLLib, &s.ncclLib) }},
	{Variable{Name: "NCCL_P2P_DISABLE", Default: "unset", Allowed: "NCCL's own values",
		Help: "NCCL's variable, honoured: 1 means no peer path either."},
		// Not ours, so never an error: NCCL reads the leading number and takes 1 alone as "disable".
		func(s *settings, v string) bool { s.ncclP2PDisable = strings.TrimSpace(v) == "1"; return true },
		nil},
}

// upstreamNames are variables of other programs under our prefix, whose nearest spelling would mislead.
var upstreamNames = map[string]string{
	"GGML_CUDA_AR_COPY_THRESHOLD": "GGML_CUDA_AR_CE_MIN_BYTES", // llama.cpp; counts wire bytes there
}

// Variables lists every environment variable the library reads, in the order of the documentation.
func Variables() []Variable {
	list := make([]Variable, len(variables))
	for i := range variables {
		list[i] = variables[i].Variable
	}
	return list
}

// loadSettings merges the Config over environ ("NAME=value", as os.Environ gives it) over the defaults. An empty value
// counts as not set, as the shell's `NAME= command` means it. A variable with a value that is not allowed is an error
// even where a Config field overrides it: what nobody reads today surprises tomorrow.
func loadSettings(cfg Config, environ []string) (settings, []string, error) {
	env := make(map[string]string)
	for _, entry := range environ {
		if name, value, ok := strings.Cut(entry, "="); ok && value != "" {
			if _, twice := env[name]; !twice { // the first one counts, as for getenv
				env[name] = value
			}
		}
	}
	s := settings{
		backend: cfg.Backend, ranks: cfg.Ranks, devices: slices.Clone(cfg.Devices), logger: cfg.Logger,
		algorithm: AlgorithmAuto, ce: true, ceMinBytes: defaultCEMinBytes, prefer: PreferOverlap, wire: WireAuto,
		peerMinBytes: -1, ringBytes: defaultRingBytes, spinTimeout: defaultSpinTimeout, p2p: P2PAuto,
		cacheDir: defaultCacheDir(env), ncclLib: defaultNCCL, probeCommand: cfg.ProbeCommand,
	}
	warnings := unknownNames(env)
	given := make(map[string]string) // row -> "NAME=value", for errors about two settings together
	for i := range variables {
		v := &variables[i]
		if value, set := env[v.Name]; set {
			given[v.Name] = fmt.Sprintf("%s=%.80q", v.Name, value)
			if !v.parse(&s, value) {
				return settings{}, warnings, notAllowed(given[v.Name], v.Allowed)
			}
			if v.NotYet != "" {
				warnings = append(warnings, fmt.Sprintf("%s is set but has no effect: %s", v.Name, v.NotYet))
			}
		}
		if v.field == nil {
			continue
		}
		if value, ok := v.field(&s, &cfg); value != nil {
			given[v.Name] = fmt.Sprintf("Config.%s=%v", v.Field, value)
			if !ok {
				return settings{}, warnings, notAllowed(given[v.Name], fieldAllowed(v))
			}
		}
	}
	if err := checkTogether(&s, given); err != nil {
		return settings{}, warnings, err
	}
	s.logStderr = s.logStderr && s.logger == nil
	if s.noop {
		warnings = append(warnings, "GGML_CUDA_AR_NOOP=1: reductions move nothing, results are wrong on purpose")
	}
	return s, warnings, nil
}

// rendezvousTCP says whether the ranks meet by TCP: a job's name has no port.
func (s *settings) rendezvousTCP() bool {
	host, port, err := net.SplitHostPort(s.rendezvous)
	if err != nil || host == "" {
		return false
	}
	_, err = strconv.ParseUint(port, 10, 16)
	return err == nil
}

// compared lists what has to be equal on all ranks of a job, under the names of the variables: whatever moves a route, a
// border, a kernel's grid or a layout in shared memory.
func (s *settings) compared(backend Backend) []setting {
	text := func(v any) string { return fmt.Sprint(v) }
	return []setting{
		{Name: "the library's version", Value: version}, {Name: "the sources' hash", Value: fmt.Sprintf("%016x", core.SourceHash())},
		{Name: "the backend", Value: backend.String()},
		{Name: "GGML_CUDA_ALLREDUCE", Value: algorithmText(s.algorithm)}, {Name: "GGML_CUDA_AR_CE", Value: text(s.ce)},
		{Name: "GGML_CUDA_AR_CE_MIN_BYTES", Value: text(s.ceMinBytes)}, {Name: "GGML_CUDA_AR_PREFER", Value: text(s.prefer)},
		{Name: "GGML_CUDA_AR_NCCL_MIN_BYTES", Value: text(s.ncclMinBytes)}, {Name: "GGML_CUDA_AR_BF16_THRESHOLD", Value: text(s.bf16Threshold)},
		{Name: "GGML_CUDA_AR_WIRE", Value: text(s.wire)},
		{Name: "GGML_CUDA_AR_PEER_MIN_BYTES", Value: text(s.peerMinBytes)}, {Name: "GGML_CUDA_AR_PEER_MAX_BYTES", Value: text(s.peerMaxBytes)},
		{Name: "GGML_CUDA_AR_COPY_CHUNK_BYTES", Value: text(s.copyChunkBytes)}, {Name: "GGML_CUDA_AR_RING_BYTES", Value: text(s.ringBytes)},
		{Name: "GGML_CUDA_AR_BLOCKS", Value: text(s.blocks)}, {Name: "GGML_CUDA_AR_SPIN_TIMEOUT_MS", Value: text(s.spinTimeout.Milliseconds())},
		{Name: "GGML_CUDA_P2P", Value: text(s.p2p)}, {Name: "NCCL_P2P_DISABLE", Value: text(s.ncclP2PDisable)},
		{Name: "GGML_CUDA_AR_NOOP", Value: text(s.noop)},
	}
}

// setting is a name and a value, as other ranks compare it.
type setting struct {
	Name, Value string
}

// checkTogether refuses what is right alone and wrong beside something else, and the fields without a variable.
func checkTogether(s *settings, given map[string]string) error {
	if s.backend < BackendAuto || s.backend > BackendEmulated {
		return notAllowed(fmt.Sprintf("Config.Backend=%d", s.backend), "BackendAuto, BackendCUDA, BackendEmulated")
	}
	if s.ranks < 0 || s.ranks > maxRanks {
		return notAllowed(fmt.Sprintf("Config.Ranks=%d", s.ranks), "0 (as many as devices) to 8")
	}
	if len(s.devices) > maxRanks || s.ranks > 0 && s.devices != nil && len(s.devices) != s.ranks {
		return notAllowed(fmt.Sprintf("Config.Devices=%v with Config.Ranks=%d", s.devices, s.ranks), "one device per rank, at most 8")
	}
	for _, device := range s.devices {
		if device < 0 {
			return notAllowed(fmt.Sprintf("Config.Devices=%v", s.devices), "device ordinals from 0")
		}
	}
	if s.copyChunkBytes > s.ringBytes/2 {
		return notAllowed(given["GGML_CUDA_AR_COPY_CHUNK_BYTES"],
			"64K to half of GGML_CUDA_AR_RING_BYTES, which is "+FormatBytes(s.ringBytes))
	}
	if s.peerMaxBytes > 0 && s.peerMinBytes > s.peerMaxBytes {
		return notAllowed(given["GGML_CUDA_AR_PEER_MAX_BYTES"], "not below GGML_CUDA_AR_PEER_MIN_BYTES, which is "+FormatBytes(s.peerMinBytes))
	}
	return nil
}

func notAllowed(given, allowed string) error {
	return newError("", ErrSetting, "%s is not allowed; allowed: %s", given, allowed)
}

// fieldAllowed is Allowed as a Config says it, where zeros have names.
func fieldAllowed(v *variable) string {
	switch v.Field {
	case "BF16Threshold":
		return "BF16Never (-1), 0 (not set), 1 and up (bytes)"
	case "CopyChunkBytes":
		return "ChunkByLink (-1), 0 (not set), 64K to half of RingBytes"
	case "Blocks":
		return "BlocksMeasured (-1), 0 (not set), 1 to 128"
	case "Trace":
		return "TraceNone (-1), 0 (not set), 1 to 1000000000"
	case "CEMinBytes", "NCCLMinBytes", "PeerMinBytes", "PeerMaxBytes":
		return "0 (not set), 1 and up (bytes)"
	case "SpinTimeout":
		return "0 (not set), 1ms to 1h"
	case "CopyEngine", "NoOp":
		return "Unset, On, Off"
	}
	return v.Allowed
}

// unknownNames gives one warning for each variable under our prefix that no row knows, sorted.
func unknownNames(env map[string]string) []string {
	var warnings []string
	for name := range env {
		if !strings.HasPrefix(name, variablePrefix) || slices.ContainsFunc(variables, func(v variable) bool { return v.Name == name }) {
			continue
		}
		nearest, known := upstreamNames[name]
		if !known {
			best := math.MaxInt
			for i := range variables {
				if d := editDistance(name, variables[i].Name); d < best {
					best, nearest = d, variables[i].Name
				}
			}
		}
		if quoted := fmt.Sprintf("%.80q", name); quoted != `"`+name+`"` { // long, or with a line feed: whatever the shell let pass
			name = quoted
		}
		warnings = append(warnings, fmt.Sprintf("%s is unknown and ignored; did you mean %s?", name, nearest))
	}
	slices.Sort(warnings)
	return warnings
}

// editDistance counts the insertions, deletions and substitutions between two names.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// defaultCacheDir is $XDG_CACHE_HOME/allreduce, else ~/.cache/allreduce, else "". XDG asks for absolute paths only.
func defaultCacheDir(env map[string]string) string {
	if dir := env["XDG_CACHE_HOME"]; filepath.IsAbs(dir) {
		return filepath.Join(dir, "allreduce")
	}
	if home := env["HOME"]; home != "" {
		return filepath.Join(home, ".cache", "allreduce")
	}
	return ""
}

// spelling pairs a choice with its spelling; the first spelling of a value is the one printed.
type spelling[T comparable] struct {
	text  string
	value T
}

var (
	algorithmNames = []spelling[Algorithm]{{"auto", AlgorithmAuto}, {"internal", AlgorithmInternal}, {"ce", AlgorithmCopyEngine},
		{"copy-engine", AlgorithmCopyEngine}, {"peer", AlgorithmPeer}, {"nccl", AlgorithmNCCL}, {"none", AlgorithmNone}}
	preferNames = []spelling[Prefer]{{"overlap", PreferOverlap}, {"latency", PreferLatency}}
	wireNames   = []spelling[WireChoice]{{"auto", WireAuto}, {"f32", WireF32}, {"bf16", WireBF16}, {"f16", WireF16}}
	p2pNames    = []spelling[P2PMode]{{"auto", P2PAuto}, {"0", P2POff}, {"1", P2PTrust}}
)

// pick reads a spelling.
func pick[T comparable](names []spelling[T], text string, to *T) bool {
	for _, n := range names {
		if n.text == text {
			*to = n.value
			return true
		}
	}
	return false
}

// choose takes a Config's choice; the zero value is not set.
func choose[T ~int8](names []spelling[T], value T, to *T) (any, bool) {
	if value == 0 {
		return nil, true
	}
	for _, n := range names {
		if n.value == value {
			*to = value
			return n.text, true
		}
	}
	return int8(value), false
}

func switched(sw Switch, to *bool) (any, bool) {
	if sw == Unset {
		return nil, true
	}
	*to = sw == On
	return int8(sw), sw == On || sw == Off
}

func parseBool(text string, to *bool) bool {
	switch text {
	case "1", "true", "on":
		*to = true
	case "0", "false", "off":
		*to = false
	default:
		return false
	}
	return true
}

func parseBytesIn(text string, low, high int64, to *int64) bool {
	n, err := ParseBytes(text)
	*to = n
	return err == nil && n >= low && n <= high
}

func bytesIn(n, low, high int64, to *int64) (any, bool) {
	if n == 0 {
		return nil, true
	}
	*to = n
	return n, n >= low && n <= high
}

func parseIntIn(text string, low, high int, to *int) bool {
	n, err := strconv.ParseUint(text, 10, 31) // unsigned: no sign, no "0x", no "_"
	*to = int(n)
	return err == nil && *to >= low && *to <= high
}

func intIn(n, low, high int, to *int) (any, bool) {
	if n == 0 {
		return nil, true
	}
	*to = n
	return n, n >= low && n <= high
}

func parseText(value string, to *string) bool {
	*to = value
	return true
}

func textField(value string, to *string) (any, bool) {
	if value == "" {
		return nil, true
	}
	*to = value
	return value, true
}

// ParseBytes reads a byte count: a whole number, with K, M or G (either case) for 1024, 1024^2 and 1024^3. Anything
// else, and what does not fit an int64, is ErrArgument.
func ParseBytes(text string) (int64, error) {
	digits, shift := text, 0
	if text != "" {
		switch text[len(text)-1] {
		case 'k', 'K':
			shift = 10
		case 'm', 'M':
			shift = 20
		case 'g', 'G':
			shift = 30
		}
		if shift > 0 {
			digits = text[:len(text)-1]
		}
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || n > math.MaxInt64>>shift {
		return 0, newError("", ErrArgument, "%.80q is no byte count; allowed: a whole number, with K, M or G for 1024, 1024^2, 1024^3, below 2^63", text)
	}
	return int64(n) << shift, nil
}

// FormatBytes writes a byte count as ParseBytes reads it, exactly, in the largest unit that divides it: 512K, 524284.
func FormatBytes(n int64) string {
	for _, unit := range []struct {
		shift int
		text  string
	}{{30, "G"}, {20, "M"}, {10, "K"}} {
		if n != 0 && n&(1<<unit.shift-1) == 0 {
			return strconv.FormatInt(n>>unit.shift, 10) + unit.text
		}
	}
	return strconv.FormatInt(n, 10)
}
