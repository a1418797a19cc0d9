package allreduce

import (
	"log/slog"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestDefaults(t *testing.T) {
	s, warnings, err := loadSettings(Config{}, []string{"HOME=/home/u", "PATH=/bin", "GGML_CUDA_AR_CE="})
	require.NoError(t, err)
	assert.Empty(t, warnings)
	assert.Equal(t, settings{
		algorithm: AlgorithmAuto, ce: true, ceMinBytes: 524288, prefer: PreferOverlap, wire: WireAuto, peerMinBytes: -1,
		ringBytes: 8 << 20, spinTimeout: 10 * time.Second, p2p: P2PAuto, cacheDir: "/home/u/.cache/allreduce",
		ncclLib: "libnccl.so.2",
	}, s)
	s, _, err = loadSettings(Config{}, []string{"HOME=/home/u", "XDG_CACHE_HOME=/var/cache"})
	require.NoError(t, err)
	assert.Equal(t, "/var/cache/allreduce", s.cacheDir)
	s, _, err = loadSettings(Config{}, nil)
	require.NoError(t, err)
	assert.Empty(t, s.cacheDir)
}

// Each row of the specification's table, its allowed values at both ends, and what lies beyond.
func TestVariablesAreStrict(t *testing.T) {
	bools := []string{"0", "1", "true", "false", "on", "off"}
	notBools := []string{"maybe", "2", "yes", "TRUE", " 1", "1 ", "-1", "00"}
	notBytes := []string{"-1", "+1", "1.5M", "0x10", "1KB", "1 K", "K", "1_000", "9223372036854775808", "8589934592G", "a"}
	for name, values := range map[string]struct{ good, bad []string }{
		"GGML_CUDA_ALLREDUCE":           {[]string{"auto", "internal", "ce", "copy-engine", "peer", "nccl", "none"}, []string{"NCCL", "0", "butterfly"}},
		"GGML_CUDA_AR_CE":               {bools, notBools},
		"GGML_CUDA_AR_CE_MIN_BYTES":     {[]string{"1", "512K", "512k", "3M", "2G", "9223372036854775807"}, append(notBytes, "0", "0K")},
		"GGML_CUDA_AR_PREFER":           {[]string{"overlap", "latency"}, []string{"speed", "1"}},
		"GGML_CUDA_AR_NCCL_MIN_BYTES":   {[]string{"1", "64M"}, append(notBytes, "0")},
		"GGML_CUDA_AR_BF16_THRESHOLD":   {[]string{"0", "1", "1M"}, notBytes},
		"GGML_CUDA_AR_WIRE":             {[]string{"auto", "f32", "bf16", "f16"}, []string{"fp16", "f64", "q8_0"}},
		"GGML_CUDA_AR_PEER_MIN_BYTES":   {[]string{"0", "1", "64K"}, notBytes},
		"GGML_CUDA_AR_PEER_MAX_BYTES":   {[]string{"1", "64M"}, append(notBytes, "0")},
		"GGML_CUDA_AR_COPY_CHUNK_BYTES": {[]string{"0", "64K", "4M"}, append(notBytes, "1", "65535", "4194305", "128M")},
		"GGML_CUDA_AR_RING_BYTES":       {[]string{"1M", "256M", "1048576"}, append(notBytes, "0", "1048575", "257M", "1G")},
		"GGML_CUDA_AR_BLOCKS":           {[]string{"0", "1", "128"}, []string{"129", "-1", "1K", "8.0", "99999999999"}},
		"GGML_CUDA_AR_EMULATED":         {[]string{"machine.json"}, nil},
		"GGML_CUDA_AR_SPIN_TIMEOUT_MS":  {[]string{"1", "3600000"}, []string{"0", "3600001", "10s", "-5", "1K"}},
		"GGML_CUDA_P2P":                 {append([]string{"auto"}, bools...), notBools},
		"GGML_CUDA_AR_TRACE":            {[]string{"0", "10", "1000000000"}, []string{"1000000001", "on", "-1"}},
		"GGML_CUDA_AR_NOOP":             {bools, notBools},
		"GGML_CUDA_AR_RENDEZVOUS":       {[]string{"host:1234", "job"}, nil},
		"GGML_CUDA_AR_SECRET_FILE":      {[]string{"/etc/secret"}, nil},
		"GGML_CUDA_AR_CACHE_DIR":        {[]string{"/tmp/c"}, nil},
		"GGML_CUDA_NCCL_LIB":            {[]string{"/opt/libnccl.so"}, nil},
		"NCCL_P2P_DISABLE":              {[]string{"0", "1", "2", "anything: it is NCCL's"}, nil},
	} {
		row := slices.IndexFunc(Variables(), func(v Variable) bool { return v.Name == name })
		require.GreaterOrEqual(t, row, 0, "%s has a row", name)
		for _, value := range values.good {
			_, _, err := loadSettings(Config{}, []string{name + "=" + value})
			assert.NoError(t, err, "%s=%s", name, value)
		}
		for _, value := range values.bad {
			_, _, err := loadSettings(Config{}, []string{name + "=" + value})
			require.ErrorIs(t, err, ErrSetting, "%s=%s", name, value)
			assert.ErrorContains(t, err, name)
			assert.ErrorContains(t, err, value)
			if name != "GGML_CUDA_AR_COPY_CHUNK_BYTES" { // its second bound is the ring's, and says so
				assert.ErrorContains(t, err, Variables()[row].Allowed)
			}
		}
	}
	assert.Len(t, Variables(), 22)
}

func TestVariableValues(t *testing.T) {
	s, warnings, err := loadSettings(Config{}, []string{
		"GGML_CUDA_ALLREDUCE=ce", "GGML_CUDA_AR_CE=off", "GGML_CUDA_AR_CE_MIN_BYTES=1", "GGML_CUDA_AR_PREFER=latency",
		"GGML_CUDA_AR_NCCL_MIN_BYTES=64M", "GGML_CUDA_AR_BF16_THRESHOLD=0", "GGML_CUDA_AR_WIRE=f16", "GGML_CUDA_AR_PEER_MIN_BYTES=0",
		"GGML_CUDA_AR_PEER_MAX_BYTES=1G", "GGML_CUDA_AR_COPY_CHUNK_BYTES=512K", "GGML_CUDA_AR_RING_BYTES=1M", "GGML_CUDA_AR_BLOCKS=16",
		"GGML_CUDA_AR_EMULATED=m", "GGML_CUDA_AR_SPIN_TIMEOUT_MS=250", "GGML_CUDA_P2P=1", "GGML_CUDA_AR_TRACE=3", "GGML_CUDA_AR_NOOP=on",
		"GGML_CUDA_AR_RENDEZVOUS=r", "GGML_CUDA_AR_SECRET_FILE=f", "GGML_CUDA_AR_CACHE_DIR=c", "GGML_CUDA_NCCL_LIB=l", "NCCL_P2P_DISABLE=1",
		"GGML_CUDA_AR_CE=1", // the second of two is not seen, as by getenv
	})
	require.NoError(t, err)
	assert.Equal(t, settings{
		logStderr: true, algorithm: AlgorithmCopyEngine, ce: false, ceMinBytes: 1, ceMinSet: true, prefer: PreferLatency,
		ncclMinBytes: 64 << 20, bf16Threshold: BF16Never, wire: WireF16, peerMinBytes: 0, peerMaxBytes: 1 << 30,
		copyChunkBytes: 512 << 10, ringBytes: 1 << 20, blocks: 16, emulated: "m", spinTimeout: 250 * time.Millisecond,
		p2p: P2PTrust, ncclP2PDisable: true, trace: 3, noop: true, rendezvous: "r", secretFile: "f", cacheDir: "c",
		cacheDirGiven: true, ncclLib: "l",
	}, s)
	all := strings.Join(warnings, "\n")
	assert.Contains(t, all, "results are wrong on purpose")
	for _, v := range Variables() {
		if v.NotYet != "" {
			assert.Contains(t, all, v.Name+" is set but has no effect: "+v.NotYet)
		}
	}
}

func TestConfigWins(t *testing.T) {
	logger := slog.New(slog.DiscardHandler)
	cfg := Config{
		Backend: BackendEmulated, Ranks: 2, Devices: []int{0, 0}, Logger: logger, Algorithm: AlgorithmInternal, CopyEngine: On,
		CEMinBytes: 7, Prefer: PreferOverlap, NCCLMinBytes: 8, BF16Threshold: BF16Never, Wire: WireAuto, PeerMinBytes: 9,
		PeerMaxBytes: 10, CopyChunkBytes: ChunkByLink, RingBytes: 2 << 20, Blocks: BlocksMeasured, SpinTimeout: time.Second,
		P2P: P2PAuto, Trace: TraceNone, NoOp: Off, Emulated: "e", Rendezvous: "R", SecretFile: "S", CacheDir: "C", NCCLLib: "N",
		ProbeCommand: "P",
	}
	s, warnings, err := loadSettings(cfg, []string{
		"GGML_CUDA_ALLREDUCE=none", "GGML_CUDA_AR_CE=0", "GGML_CUDA_AR_CE_MIN_BYTES=1", "GGML_CUDA_AR_PREFER=latency",
		"GGML_CUDA_AR_BF16_THRESHOLD=5", "GGML_CUDA_AR_WIRE=f16", "GGML_CUDA_AR_COPY_CHUNK_BYTES=4M", "GGML_CUDA_AR_RING_BYTES=8M",
		"GGML_CUDA_AR_BLOCKS=16", "GGML_CUDA_AR_SPIN_TIMEOUT_MS=250", "GGML_CUDA_P2P=1", "GGML_CUDA_AR_TRACE=3", "GGML_CUDA_AR_NOOP=on",
	})
	require.NoError(t, err)
	assert.Empty(t, warnings)
	assert.Equal(t, settings{
		backend: BackendEmulated, ranks: 2, devices: []int{0, 0}, logger: logger, algorithm: AlgorithmInternal, ce: true,
		ceMinBytes: 7, ceMinSet: true, prefer: PreferOverlap, ncclMinBytes: 8, bf16Threshold: BF16Never, wire: WireAuto,
		peerMinBytes: 9, peerMaxBytes: 10, ringBytes: 2 << 20, spinTimeout: time.Second, p2p: P2PAuto, emulated: "e",
		rendezvous: "R", secretFile: "S", cacheDir: "C", cacheDirGiven: true, ncclLib: "N", probeCommand: "P",
	}, s)
	// A field must not hide a variable that is wrong.
	_, _, err = loadSettings(Config{CopyEngine: On}, []string{"GGML_CUDA_AR_CE=maybe"})
	assert.ErrorIs(t, err, ErrSetting)
}

func TestConfigOutOfRangeNamesTheField(t *testing.T) {
	for field, cfg := range map[string]Config{
		"Backend":                  {Backend: 7},
		"Ranks":                    {Ranks: 9},
		"Devices":                  {Devices: []int{0, -1}},
		"Config.Devices=[0 1]":     {Devices: []int{0, 1}, Ranks: 3},
		"Algorithm":                {Algorithm: 99},
		"CopyEngine":               {CopyEngine: 3},
		"CEMinBytes":               {CEMinBytes: -1},
		"Prefer":                   {Prefer: -1},
		"NCCLMinBytes":             {NCCLMinBytes: -5},
		"BF16Threshold":            {BF16Threshold: -2},
		"Wire":                     {Wire: 5},
		"PeerMinBytes":             {PeerMinBytes: -1},
		"PeerMaxBytes":             {PeerMinBytes: 5, PeerMaxBytes: 4},
		"CopyChunkBytes":           {CopyChunkBytes: 65535},
		"Config.CopyChunkBytes=10": {CopyChunkBytes: 1048576, RingBytes: 1 << 20},
		"RingBytes":                {RingBytes: 1},
		"Blocks":                   {Blocks: 129},
		"SpinTimeout":              {SpinTimeout: time.Microsecond},
		"Config.SpinTimeout=1h0":   {SpinTimeout: time.Hour + 1},
		"P2P":                      {P2P: 4},
		"Trace":                    {Trace: -2},
		"NoOp":                     {NoOp: -1},
	} {
		_, _, err := loadSettings(cfg, nil)
		require.ErrorIs(t, err, ErrSetting, field)
		assert.ErrorContains(t, err, field)
		assert.ErrorContains(t, err, "allowed: ")
	}
}

// Every field a row names exists, and every field of Config is a row's or one of those without a variable.
func TestEveryConfigFieldHasItsVariable(t *testing.T) {
	without := []string{"Backend", "Ranks", "Devices", "Logger", "ProbeCommand"}
	for _, v := range Variables() {
		if v.Field != "" {
			without = append(without, v.Field)
		}
		assert.NotEmpty(t, v.Allowed, v.Name)
		assert.NotEmpty(t, v.Default, v.Name)
		assert.True(t, strings.HasSuffix(v.Help, "."), v.Name)
	}
	var fields []string
	for field := range reflect.TypeFor[Config]().Fields() {
		fields = append(fields, field.Name)
	}
	assert.ElementsMatch(t, fields, without)
}

func TestUnknownNames(t *testing.T) {
	_, warnings, err := loadSettings(Config{}, []string{
		"GGML_CUDA_AR_RINGBYTES=5", "GGML_CUDA_AR_CE_MIN_BYTE=1", "GGML_CUDA_AR_COPY_THRESHOLD=1", "GGML_CUDA_DISABLE_GRAPHS=1",
		"GGML_CUDA_AR_RINGBYTES=6",
	})
	require.NoError(t, err)
	assert.Equal(t, []string{
		"GGML_CUDA_AR_CE_MIN_BYTE is unknown and ignored; did you mean GGML_CUDA_AR_CE_MIN_BYTES?",
		"GGML_CUDA_AR_COPY_THRESHOLD is unknown and ignored; did you mean GGML_CUDA_AR_CE_MIN_BYTES?",
		"GGML_CUDA_AR_RINGBYTES is unknown and ignored; did you mean GGML_CUDA_AR_RING_BYTES?",
	}, warnings)
}

func TestBytes(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "1": 1, "512K": 524288, "1m": 1 << 20, "3G": 3 << 30, "007": 7,
		"9223372036854775807": math.MaxInt64, "8589934591G": 8589934591 << 30} {
		got, err := ParseBytes(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Min(0).Draw(t, "n")
		got, err := ParseBytes(FormatBytes(n))
		if err != nil || got != n {
			t.Fatalf("%d -> %q -> %d, %v", n, FormatBytes(n), got, err)
		}
	})
	assert.Equal(t, "512K 524284 8M 1536K 0", strings.Join([]string{FormatBytes(524288), FormatBytes(524284), FormatBytes(8 << 20),
		FormatBytes(1536 << 10), FormatBytes(0)}, " "))
}
