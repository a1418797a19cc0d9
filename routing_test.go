package allreduce

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var (
	floats = typesOf(F32, F16, BF16)
	all    = typesOf(F32, F16, BF16, F64, I64, I32, I8, U8)
)

// machine describes what exists: a machine with every path, without peer access.
func machine(change ...func(*capabilities)) capabilities {
	c := capabilities{
		internal:   capability{ok: true, types: floats, wires: floats},
		copyEngine: capability{ok: true, types: floats, wires: floats},
		peer:       capability{ok: true, types: floats, wires: floats},
		nccl:       capability{ok: true, types: all, wires: floats, strided: true},
	}
	for _, f := range change {
		f(&c)
	}
	return c
}

func noNCCL(c *capabilities)     { c.nccl = capability{why: "libnccl.so.2 was not found"} }
func noInternal(c *capabilities) { c.internal = capability{why: "compute capability 6.1"} }
func noEngines(c *capabilities)  { c.copyEngine = capability{why: "the platform has none"} }
func noPeer(c *capabilities)     { c.peer = capability{why: "not in this version"} }

func saying(v verdict) func(*capabilities) {
	return func(c *capabilities) {
		c.verdict = v
		if v > verdictProven {
			c.verdictWhy = "GPU 0 to 1"
		}
	}
}

func table(t require.TestingT, caps capabilities, ranks int, environ ...string) *routeTable {
	s, _, err := loadSettings(Config{}, environ)
	require.NoError(t, err)
	routes, err := newRouteTable(&s, &caps, ranks)
	require.NoError(t, err)
	return routes
}

// ask gives "path wire: reason" or the error's text.
func ask(routes *routeTable, bytes int64, typ Type, strided bool) string {
	b, err := routes.route(bytes, typ, Sum, strided)
	if err != nil {
		return err.Error()
	}
	r := b.route(bytes)
	return r.Path.String() + " " + r.Wire.String() + ": " + r.Reason
}

func TestRouting(t *testing.T) {
	const k, m = int64(1) << 10, int64(1) << 20
	type step struct {
		bytes int64
		want  string
	}
	for _, c := range []struct {
		name    string
		caps    capabilities
		ranks   int
		environ string
		typ     Type
		strided bool
		steps   []step
	}{
		{"the two-GPU case of the specification", machine(), 2, "", F32, false, []step{
			{0, "none none: no elements: nothing to do"},
			{4, "internal f32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K: internal"},
			{524284, "internal f32: 524284 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K: internal"},
			{524288, "copy-engine bf16: 524288 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K: copy-engine"},
			{math.MaxInt64, "copy-engine bf16: 9223372036854775807 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K: copy-engine"}}},
		{"16-bit payloads travel as they are", machine(), 2, "", F16, false, []step{
			{2, "internal f16: 2 bytes are below"}, {524288, "copy-engine f16: 524288 bytes reach"}}},
		{"other types are NCCL's", machine(), 2, "", I32, false, []step{
			{0, "none none"},
			{4, "nccl i32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K, but internal does not take i32: nccl"},
			{524288, "nccl i32: 524288 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K, but copy-engine does not take i32: nccl"}}},
		{"other types without NCCL", machine(noNCCL), 2, "", F64, false, []step{
			{0, "none none"},
			{8, "allreduce: no path here takes f64, contiguous: internal does not take f64; NCCL is not available (libnccl.so.2 was not found); copy-engine does not take f64"}}},
		{"rows with a pitch", machine(), 3, "", F32, true, []step{
			{4, "nccl f32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K, but internal does not take strided rows: nccl"},
			{m, "nccl bf16: 1048576 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K, but copy-engine does not take strided rows: nccl"}}},
		{"rows with a pitch, no NCCL", machine(noNCCL), 3, "", F32, true, []step{
			{4, "allreduce: no path here takes f32, strided: internal does not take strided rows; "}}},

		{"every reduction through the engines", machine(), 2, "GGML_CUDA_AR_CE_MIN_BYTES=1", F32, false, []step{
			{0, "none"}, {4, "copy-engine bf16: 4 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=1: copy-engine"}, {m, "copy-engine"}}},
		{"CE=0", machine(), 2, "GGML_CUDA_AR_CE=0", F32, false, []step{
			{524284, "internal f32: 524284 bytes are below"},
			{524288, "nccl bf16: 524288 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K, but GGML_CUDA_AR_CE=0: nccl"}}},
		{"CE=0 without NCCL", machine(noNCCL), 2, "GGML_CUDA_AR_CE=0", F32, false, []step{
			{524284, "internal f32: 524284 bytes are below"},
			{524288, "internal f32: 524288 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K, but GGML_CUDA_AR_CE=0 and NCCL is not available (libnccl.so.2 was not found): internal"}}},
		{"CE=0 beside a border of 1", machine(noNCCL), 2, "GGML_CUDA_AR_CE=0 GGML_CUDA_AR_CE_MIN_BYTES=1", F32, false, []step{
			{4, "internal f32: 4 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=1, but GGML_CUDA_AR_CE=0 and NCCL"}}},

		{"one rank copies", machine(), 1, "GGML_CUDA_AR_CE_MIN_BYTES=1", U8, true, []step{
			{0, "none none: no elements"}, {5, "none none: one rank: the result is a copy"}}},
		{"one rank needs no forced path", machine(noNCCL), 1, "GGML_CUDA_ALLREDUCE=nccl", F32, false, []step{{4, "none none: one rank"}}},
		{"one rank is not disabled", machine(), 1, "GGML_CUDA_ALLREDUCE=none", F32, false, []step{{4, "none none: one rank"}}},
		{"none", machine(), 2, "GGML_CUDA_ALLREDUCE=none", F32, false, []step{
			{0, "none none: no elements"}, {4, "allreduce: GGML_CUDA_ALLREDUCE=none: the caller reduces"}}},

		{"forced internal ignores thresholds", machine(), 2, "GGML_CUDA_ALLREDUCE=internal GGML_CUDA_AR_NCCL_MIN_BYTES=1", F32, false, []step{
			{4, "internal f32: GGML_CUDA_ALLREDUCE=internal: internal"}, {64 * m, "internal f32: GGML_CUDA_ALLREDUCE=internal: internal"}}},
		{"forced engines", machine(), 2, "GGML_CUDA_ALLREDUCE=copy-engine", F32, false, []step{{4, "copy-engine bf16: GGML_CUDA_ALLREDUCE=ce: copy-engine"}}},
		{"forced engines, a type they cannot take", machine(), 2, "GGML_CUDA_ALLREDUCE=ce", I8, false, []step{
			{1, "nccl i8: GGML_CUDA_ALLREDUCE=ce, but copy-engine does not take i8: nccl"}}},
		{"forced NCCL", machine(saying(verdictProven)), 2, "GGML_CUDA_ALLREDUCE=nccl", F32, false, []step{
			{524284, "nccl f32: GGML_CUDA_ALLREDUCE=nccl: nccl"}, {524288, "nccl bf16: GGML_CUDA_ALLREDUCE=nccl: nccl"}}},
		{"forced peer", machine(saying(verdictProven)), 2, "GGML_CUDA_ALLREDUCE=peer", F32, false, []step{
			{1 << 40, "peer f32: GGML_CUDA_ALLREDUCE=peer: peer"}}},

		{"NCCL from a border", machine(), 2, "GGML_CUDA_AR_NCCL_MIN_BYTES=64M", F32, false, []step{
			{64*m - 4, "copy-engine bf16"}, {64 * m, "nccl bf16: 67108864 bytes reach GGML_CUDA_AR_NCCL_MIN_BYTES=64M: nccl"}}},
		{"NCCL from a border, absent", machine(noNCCL), 2, "GGML_CUDA_AR_NCCL_MIN_BYTES=1", F32, false, []step{
			{4, "internal f32: 4 bytes are below"}, {64 * m, "copy-engine bf16"}}},
		{"the border counts with proven peers too", machine(saying(verdictProven)), 2, "GGML_CUDA_AR_NCCL_MIN_BYTES=1M", F32, false, []step{
			{m - 4, "peer f32"}, {m, "nccl bf16: 1048576 bytes reach GGML_CUDA_AR_NCCL_MIN_BYTES=1M: nccl"}}},

		{"no internal path", machine(noInternal), 2, "", F32, false, []step{
			{4, "nccl f32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K, but internal is not available (compute capability 6.1): nccl"},
			{524288, "copy-engine bf16: 524288 bytes reach"}}},
		{"no internal path, no NCCL: the engines at every size", machine(noInternal, noNCCL), 2, "", F32, false, []step{
			{4, "copy-engine bf16: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K, but internal is not available (compute capability 6.1) and NCCL is not available (libnccl.so.2 was not found): copy-engine"},
			{524288, "copy-engine bf16: 524288 bytes reach"}}},
		{"nothing", machine(noInternal, noNCCL), 2, "GGML_CUDA_AR_CE=0", F32, false, []step{{0, "none"}, {4, "allreduce: no path here takes f32, contiguous: "}}},
		{"no engines", machine(noEngines), 2, "", F32, false, []step{
			{524284, "internal"}, {524288, "nccl bf16: 524288 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K, but copy-engine is not available (the platform has none): nccl"}}},
		{"internal alone", machine(noEngines, noNCCL), 2, "", F32, false, []step{{524284, "internal f32"}, {1 << 33, "internal f32"}}},

		{"proven", machine(saying(verdictProven)), 2, "", F32, false, []step{
			{4, "peer f32: peer access is proven: peer"}, {64 * m, "peer f32"},
			{64*m + 4, "nccl bf16: 67108868 bytes exceed 64M, up to which the peer path was measured to win: nccl"}}},
		{"proven, a band given", machine(saying(verdictProven)), 4, "GGML_CUDA_AR_PEER_MIN_BYTES=64K GGML_CUDA_AR_PEER_MAX_BYTES=1M", F32, false, []step{
			{64*k - 4, "nccl f32: 65532 bytes are below GGML_CUDA_AR_PEER_MIN_BYTES=64K: nccl"}, {64 * k, "peer f32"}, {m, "peer f32"},
			{m + 4, "nccl bf16: 1048580 bytes exceed GGML_CUDA_AR_PEER_MAX_BYTES=1M: nccl"}}},
		{"proven, no NCCL", machine(saying(verdictProven), noNCCL), 2, "GGML_CUDA_AR_PEER_MIN_BYTES=64K", F32, false, []step{
			{4, "peer f32: peer access is proven and NCCL is not available (libnccl.so.2 was not found): peer"}, {1 << 30, "peer f32: peer access is proven and NCCL"}}},
		{"proven, a type peer cannot take", machine(saying(verdictProven)), 2, "", I64, false, []step{
			{8, "nccl i64: peer access is proven, but peer does not take i64: nccl"}}},
		{"proven, no peer path", machine(saying(verdictProven), noPeer), 2, "", F32, false, []step{
			{4, "nccl f32: peer access is proven, but peer is not available (not in this version): nccl"}}},
		{"proven, no peer path, no NCCL", machine(saying(verdictProven), noPeer, noNCCL), 2, "", F32, false, []step{
			{4, "internal f32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K: internal (peer is not available (not in this version))"}, {m, "copy-engine bf16"}}},
		{"unproven, NCCL", machine(saying(verdictUnproven)), 2, "", F32, false, []step{
			{4, "nccl f32: peer access not proven: run allreduce probe"}, {m, "nccl bf16: peer access not proven: run allreduce probe"}}},
		{"unproven, no NCCL", machine(saying(verdictUnproven), noNCCL), 2, "", F32, false, []step{
			{4, "internal f32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K: internal (peer access not proven: run allreduce probe)"}, {m, "copy-engine bf16"}}},
		{"unproven, P2P=0", machine(saying(verdictUnproven)), 2, "GGML_CUDA_P2P=0", F32, false, []step{
			{4, "internal f32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K: internal (GGML_CUDA_P2P=0)"}, {m, "copy-engine bf16"}}},
		{"proven, P2P=0", machine(saying(verdictProven)), 2, "GGML_CUDA_P2P=0", F32, false, []step{{4, "internal"}, {m, "copy-engine"}}},
		{"proven, NCCL_P2P_DISABLE", machine(saying(verdictProven)), 2, "NCCL_P2P_DISABLE=1 GGML_CUDA_P2P=1", F32, false, []step{
			{4, "internal f32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K: internal (NCCL_P2P_DISABLE=1)"}}},
		{"trusted", machine(saying(verdictUnproven)), 2, "GGML_CUDA_P2P=1", F32, false, []step{
			{4, "peer f32: peer access is trusted by GGML_CUDA_P2P=1: peer"}}},
		{"denied beats trust", machine(saying(verdictDenied)), 2, "GGML_CUDA_P2P=1", F32, false, []step{{4, "internal"}}},
		{"one device", machine(saying(verdictOneDevice)), 2, "GGML_CUDA_P2P=1", F32, false, []step{{4, "internal"}, {m, "copy-engine"}}},
		{"slow", machine(saying(verdictSlow)), 2, "", F32, false, []step{{4, "internal f32: 4 bytes are below GGML_CUDA_AR_CE_MIN_BYTES=512K: internal (peer access is slow: GPU 0 to 1)"}}},
		{"broken", machine(saying(verdictBroken)), 2, "", F32, false, []step{{4, "internal"}, {m, "copy-engine bf16: 1048576 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K: copy-engine (peer access is broken: GPU 0 to 1)"}}},
		{"unsupported", machine(saying(verdictUnsupported)), 2, "", F32, false, []step{{4, "internal"}, {m, "copy-engine"}}},
		{"inconclusive", machine(saying(verdictInconclusive)), 2, "", F32, false, []step{{4, "internal"}, {m, "copy-engine"}}},
		{"timeout", machine(saying(verdictTimeout)), 2, "", F32, false, []step{{4, "internal"}, {m, "copy-engine"}}},

		{"BF16 never", machine(), 2, "GGML_CUDA_AR_BF16_THRESHOLD=0", F32, false, []step{{4, "internal f32"}, {1 << 30, "copy-engine f32"}}},
		{"BF16 always", machine(), 2, "GGML_CUDA_AR_BF16_THRESHOLD=1", F32, false, []step{{4, "internal bf16"}, {m, "copy-engine bf16"}}},
		{"BF16 from 1M", machine(), 2, "GGML_CUDA_AR_BF16_THRESHOLD=1M", F32, false, []step{{4, "internal f32"}, {m - 4, "copy-engine f32"}, {m, "copy-engine bf16"}}},
		{"BF16 from 1M, NCCL", machine(), 2, "GGML_CUDA_AR_BF16_THRESHOLD=1M GGML_CUDA_ALLREDUCE=nccl", F32, false, []step{{m - 4, "nccl f32"}, {m, "nccl bf16"}}},
		{"wire f32", machine(), 2, "GGML_CUDA_AR_WIRE=f32 GGML_CUDA_AR_BF16_THRESHOLD=1", F32, false, []step{{4, "internal f32"}, {m, "copy-engine f32"}}},
		{"wire bf16", machine(), 2, "GGML_CUDA_AR_WIRE=bf16 GGML_CUDA_AR_BF16_THRESHOLD=0", F32, false, []step{{4, "internal bf16"}, {m, "copy-engine bf16"}}},
		{"wire f16", machine(), 2, "GGML_CUDA_AR_WIRE=f16", F32, false, []step{{4, "internal f16"}, {m, "copy-engine f16"}}},
		{"wire f16, BF16 payload", machine(), 2, "GGML_CUDA_AR_WIRE=f16", BF16, false, []step{{4, "internal bf16"}, {m, "copy-engine bf16"}}},

		{"latency: exact against BF16", machine(), 2, "GGML_CUDA_AR_PREFER=latency", F32, false, []step{
			{m - 4, "internal f32: 1048572 bytes are below 1M, where copy-engine with wire bf16 was measured to pass internal with wire f32 (GGML_CUDA_AR_PREFER=latency): internal"},
			{m, "copy-engine bf16: 1048576 bytes reach 1M, where"}}},
		{"latency: both exact", machine(), 2, "GGML_CUDA_AR_PREFER=latency GGML_CUDA_AR_WIRE=f32", F32, false, []step{{6*m - 4, "internal f32"}, {6 * m, "copy-engine f32: 6291456 bytes reach 6M"}}},
		{"latency: both BF16", machine(), 2, "GGML_CUDA_AR_PREFER=latency GGML_CUDA_AR_BF16_THRESHOLD=1", F32, false, []step{{12*m - 4, "internal bf16"}, {12 * m, "copy-engine bf16: 12582912 bytes reach 12M"}}},
		{"latency: the wires change on the way", machine(), 2, "GGML_CUDA_AR_PREFER=latency GGML_CUDA_AR_BF16_THRESHOLD=8M", F32, false, []step{
			{6*m - 4, "internal f32"}, {6 * m, "copy-engine f32"}, {8*m - 4, "copy-engine f32"}, {8 * m, "internal bf16"}, {12 * m, "copy-engine bf16"}}},
		{"latency: 16-bit payload", machine(), 2, "GGML_CUDA_AR_PREFER=latency", BF16, false, []step{{6*m - 2, "internal bf16"}, {6 * m, "copy-engine bf16"}}},
		{"latency: a border given stays", machine(), 2, "GGML_CUDA_AR_PREFER=latency GGML_CUDA_AR_CE_MIN_BYTES=512K", F32, false, []step{{524284, "internal"}, {524288, "copy-engine"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			routes := table(t, c.caps, c.ranks, strings.Fields(c.environ)...)
			for _, step := range c.steps {
				got := ask(routes, step.bytes, c.typ, c.strided)
				assert.True(t, strings.HasPrefix(got, step.want), "%d bytes\n got %s\nwant %s", step.bytes, got, step.want)
			}
		})
	}
}

// The first storey: two ranks, F32, two transports. Neither other types nor a third wire exist.
func TestRoutingOfTheFirstStorey(t *testing.T) {
	first := capability{ok: true, types: typesOf(F32), wires: typesOf(F32, BF16)}
	caps := capabilities{internal: first, copyEngine: first, peer: capability{why: "not yet"}, nccl: capability{why: "not yet"}}
	routes := table(t, caps, 2)
	assert.Contains(t, ask(routes, 524284, F32, false), "internal f32: ")
	assert.Contains(t, ask(routes, 524288, F32, false), "copy-engine bf16: ")
	_, err := routes.route(2, BF16, Sum, false)
	require.ErrorIs(t, err, ErrUnsupported)
	assert.ErrorContains(t, err, "no path here takes bf16, contiguous")
	_, err = table(t, caps, 2, "GGML_CUDA_AR_WIRE=f16").route(4, F32, Sum, false)
	require.ErrorIs(t, err, ErrUnsupported)
	assert.ErrorContains(t, err, "internal has no wire f16")
}

func TestForcedPathsThatCannotExist(t *testing.T) {
	for _, c := range []struct {
		caps     capabilities
		environ  string
		sentinel error
		text     string
	}{
		{machine(noNCCL), "GGML_CUDA_ALLREDUCE=nccl", ErrNCCL, "GGML_CUDA_ALLREDUCE=nccl cannot be had here: NCCL is not available (libnccl.so.2 was not found)"},
		{machine(), "GGML_CUDA_ALLREDUCE=ce GGML_CUDA_AR_CE=0", ErrSetting, "GGML_CUDA_ALLREDUCE=ce contradicts GGML_CUDA_AR_CE=0"},
		{machine(noEngines), "GGML_CUDA_ALLREDUCE=ce", ErrUnsupported, "the platform has none"},
		{machine(noInternal), "GGML_CUDA_ALLREDUCE=internal", ErrUnsupported, "compute capability 6.1"},
		{machine(noPeer, saying(verdictProven)), "GGML_CUDA_ALLREDUCE=peer", ErrUnsupported, "peer is not available (not in this version)"},
		{machine(), "GGML_CUDA_ALLREDUCE=peer", ErrUnsupported, "the driver denies peer access"},
		{machine(saying(verdictOneDevice)), "GGML_CUDA_ALLREDUCE=peer", ErrUnsupported, "all ranks share one device"},
		{machine(saying(verdictUnproven)), "GGML_CUDA_ALLREDUCE=peer", ErrUnsupported, "peer access not proven: run allreduce probe"},
		{machine(saying(verdictBroken)), "GGML_CUDA_ALLREDUCE=peer", ErrUnsupported, "peer access is broken: GPU 0 to 1"},
		{machine(saying(verdictProven)), "GGML_CUDA_ALLREDUCE=peer GGML_CUDA_P2P=0", ErrUnsupported, "GGML_CUDA_P2P=0"},
	} {
		s, _, err := loadSettings(Config{}, strings.Fields(c.environ))
		require.NoError(t, err)
		_, err = newRouteTable(&s, &c.caps, 2)
		require.ErrorIs(t, err, c.sentinel, c.environ)
		assert.ErrorContains(t, err, c.text)
	}
}

func TestAllocationFailure(t *testing.T) {
	walk := func(caps capabilities, bytes int64, environ ...string) string {
		routes := table(t, caps, 2, environ...)
		b, err := routes.route(bytes, F32, Sum, false)
		require.NoError(t, err)
		var steps []string
		for err == nil {
			r := b.route(bytes)
			steps = append(steps, r.Path.String()+" "+r.Wire.String())
			if len(steps) > 1 {
				assert.Contains(t, r.Reason, "could not be allocated: "+r.Path.String())
			}
			b, err = routes.next(b)
		}
		require.ErrorIs(t, err, ErrAlloc)
		return strings.Join(steps, ", ")
	}
	assert.Equal(t, "copy-engine bf16, nccl bf16", walk(machine(), 1<<20))
	assert.Equal(t, "copy-engine bf16, nccl f32", walk(machine(), 4, "GGML_CUDA_AR_CE_MIN_BYTES=1"))
	assert.Equal(t, "copy-engine bf16, internal f32", walk(machine(noNCCL), 1<<20))
	assert.Equal(t, "copy-engine bf16", walk(machine(noNCCL, noInternal), 1<<20))
	assert.Equal(t, "peer f32, nccl f32", walk(machine(saying(verdictProven)), 4))
	assert.Equal(t, "peer f32, internal f32, copy-engine bf16", walk(machine(saying(verdictProven), noNCCL), 4))
}

func TestRouteArguments(t *testing.T) {
	routes := table(t, machine(), 2)
	for _, err := range []error{
		second(routes.route(-1, F32, Sum, false)), second(routes.route(4, 8, Sum, false)), second(routes.route(4, TypeNone, Sum, false)),
		second(routes.route(4, F32, 2, false)),
	} {
		require.ErrorIs(t, err, ErrArgument)
	}
	for _, typ := range []Type{I64, I32, I8, U8} {
		err := second(routes.route(8, typ, Avg, false))
		require.ErrorIs(t, err, ErrUnsupported)
		assert.ErrorContains(t, err, "avg of "+typ.String())
		require.NoError(t, second(routes.route(0, typ, Avg, false)))
		require.NoError(t, second(routes.route(8, typ, Sum, false)))
	}
	require.NoError(t, second(routes.route(8, F64, Avg, false)))
	require.ErrorIs(t, second(table(t, machine(), 2, "GGML_CUDA_ALLREDUCE=none").route(8, I8, Avg, false)), ErrDisabled)
	require.NoError(t, second(table(t, machine(), 1).route(8, I8, Avg, false)))

	first, again := second(table(t, machine(noNCCL), 2).route(8, I8, Sum, false)), second(table(t, machine(noNCCL), 2).route(8, I8, Sum, false))
	assert.NotSame(t, first, again, "a caller may write its operation into the error")
}

func second[T any](_ T, err error) error { return err }

// Whatever the machine and the settings: every input gets a path that exists and takes it, or a typed error; the table
// says at every size what the rules say; bands ascend and end open; the same question gets the same answer.
func TestRoutingProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		capDraw := func(name string) capability {
			return capability{ok: rapid.Bool().Draw(t, name), why: name + " missing", strided: rapid.Bool().Draw(t, name+" strided"),
				types: typeSet(rapid.Uint16Range(0, 255).Draw(t, name+" types")), wires: typeSet(rapid.Uint16Range(0, 7).Draw(t, name+" wires"))}
		}
		size := rapid.OneOf(rapid.Int64Range(1, 1<<27), rapid.SampledFrom([]int64{1, 4, 524284, 524288, 1 << 20, 3 << 20, 8 << 20, math.MaxInt64}))
		caps := capabilities{internal: capDraw("internal"), copyEngine: capDraw("engines"), peer: capDraw("peer"), nccl: capDraw("nccl"),
			verdict: verdict(rapid.IntRange(0, len(verdictNames)-1).Draw(t, "verdict"))}
		cfg := Config{
			Algorithm: Algorithm(rapid.IntRange(0, 6).Draw(t, "algorithm")), CopyEngine: Switch(rapid.IntRange(0, 2).Draw(t, "ce")),
			Prefer: Prefer(rapid.IntRange(0, 2).Draw(t, "prefer")), Wire: WireChoice(rapid.IntRange(0, 4).Draw(t, "wire")),
			P2P: P2PMode(rapid.IntRange(0, 3).Draw(t, "p2p")),
		}
		for _, field := range []*int64{&cfg.CEMinBytes, &cfg.NCCLMinBytes, &cfg.BF16Threshold, &cfg.PeerMinBytes} {
			if rapid.Bool().Draw(t, "set") {
				*field = size.Draw(t, "bytes")
			}
		}
		s, _, err := loadSettings(cfg, nil)
		require.NoError(t, err)
		ranks := rapid.IntRange(1, 8).Draw(t, "ranks")
		routes, err := newRouteTable(&s, &caps, ranks)
		if err != nil {
			var typed *Error
			require.ErrorAs(t, err, &typed)
			require.True(t, cfg.Algorithm >= AlgorithmInternal && cfg.Algorithm <= AlgorithmNCCL && ranks > 1, "only a forced path fails")
			return
		}
		r := newRouter(&s, &caps, ranks)
		for typ := range Type(numTypes) {
			for layout, bands := range routes.bands[typ] {
				previous := int64(-1)
				for _, b := range bands {
					require.Greater(t, b.MaxBytes, previous)
					previous = b.MaxBytes
				}
				require.Equal(t, int64(math.MaxInt64), previous)

				bytes := rapid.OneOf(size, rapid.Just(int64(0))).Draw(t, "bytes")
				want := r.decide(bytes, typ, layout == 1)
				got, err := routes.route(bytes, typ, Sum, layout == 1)
				if want.err != nil {
					require.EqualError(t, err, want.err.Error())
					require.True(t, want.err.Err == ErrUnsupported || want.err.Err == ErrDisabled)
					continue
				}
				require.NoError(t, err)
				want.MaxBytes = got.MaxBytes
				require.True(t, got.same(&want), "%v %v", got, want)
				if got.Path == PathNone {
					require.True(t, bytes == 0 || ranks == 1)
					require.Equal(t, TypeNone, got.Wire)
					continue
				}
				for b := got; b != nil; b = b.fallback {
					c := caps.of(b.Path)
					require.True(t, c.ok && c.types.has(typ) && (layout == 0 || c.strided), "%s serves", b.Path)
					require.True(t, typ != F32 && b.Wire == typ || typ == F32 && c.wires.has(b.Wire))
					require.False(t, b.Path == PathCopyEngine && !s.ce)
					require.False(t, b == got && b.Path == PathPeer && !r.proven, "peer only where proven")
					require.NotEmpty(t, b.Reason)
				}
			}
		}
	})
}

func TestLookupDoesNotAllocate(t *testing.T) {
	routes := table(t, machine(), 2, "GGML_CUDA_AR_PREFER=latency", "GGML_CUDA_AR_BF16_THRESHOLD=8M")
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		b, err := routes.route(1<<30, F32, Avg, false)
		if err != nil || b.Path != PathCopyEngine {
			t.Fail()
		}
	}))
}

func BenchmarkRoute(b *testing.B) {
	routes := table(b, machine(), 2)
	for b.Loop() {
		_, _ = routes.route(1<<20, F32, Sum, false)
	}
}
