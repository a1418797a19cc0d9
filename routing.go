package allreduce

// Routing is policy and nothing else: it turns settings, what exists here and the peer verdicts into small tables of
// bands when a communicator is made, and a call looks its band up. No state, no I/O, no capture: capture may turn a
// route into an error, never into another path. The rules are those of docs/multi-gpu.md, in their order:
//
//	0  no elements, or one rank: path none
//	1  GGML_CUDA_ALLREDUCE=none: ErrDisabled
//	2  a forced path, whatever the size
//	3  GGML_CUDA_AR_NCCL_MIN_BYTES reached and NCCL there: nccl
//	4  peer access proven on every pair: peer where it wins, else nccl; reported but unproven, NCCL there: nccl
//	5  else internal below the border, copy-engine from it
//	6  what the chosen path cannot serve or allocate: nccl, else internal, else copy-engine, else ErrUnsupported

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Borders that were measured (two H200, PCIe 5 x16, peer access off), in payload bytes.
const (
	// With PREFER=latency, by the wires of internal and copy-engine. With equal wires the engines win from about 6 MiB on the
	// wire: 4 MiB take them 146 us and internal 138, 8 MiB both about 246 (internal: one GPU as its own peer, 2026-12-01,
	// docs/performance.md); an exact internal against a BF16 engine moves twice the bytes, and loses from 1 MiB.
	latencyBorderExactBF16 = 1 << 20  // F32 payload: internal F32, copy-engine 16-bit
	latencyBorderExact     = 6 << 20  // F32 payload: both F32
	latencyBorderBF16      = 12 << 20 // F32 payload: both 16-bit
	latencyBorderNarrow    = 6 << 20  // F16 or BF16 payload

	// NCCL's BF16 wire pays for its two conversions from here on.
	ncclBF16MinBytes = 512 << 10

	// The peer prototype beats NCCL at every size measured, 1 KiB to 64 MiB (225 us against 241).
	peerMinMeasured = 0
	peerMaxMeasured = 64 << 20
)

// typeSet is a set of element types, one bit each.
type typeSet uint16

func typesOf(types ...Type) (set typeSet) {
	for _, t := range types {
		set |= 1 << t
	}
	return set
}

func (set typeSet) has(t Type) bool { return t.valid() && set&(1<<t) != 0 }

// capability is what one path can do on this machine, for this communicator's ranks.
type capability struct {
	ok      bool
	why     string  // where !ok: the reason, as "NCCL is not available (...)" quotes it
	types   typeSet // payloads it takes
	wires   typeSet // wires it can give an F32 payload, F32 included; other payloads travel as they are
	strided bool    // takes rows with a pitch
}

// verdict is what is known about peer access between the ranks' devices: the worst of all ordered pairs.
type verdict int8

const (
	verdictDenied       verdict = iota // the driver denies it for at least one pair
	verdictOneDevice                   // all ranks share one device: there is no pair
	verdictUnproven                    // the driver reports it for all pairs, nothing has proven it
	verdictProven                      // every pair was proven
	verdictSlow                        // right, but slower than through the host
	verdictBroken                      // bytes did not arrive
	verdictUnsupported                 // the probe found it not supported
	verdictInconclusive                // the probe could not tell
	verdictTimeout                     // the probe had to be ended
)

var verdictNames = [...]string{"denied", "one device", "unproven", "ok", "slow", "broken", "unsupported", "inconclusive", "timeout"}

func (v verdict) String() string { return verdictNames[v] }

// capabilities is everything routing knows about the machine.
type capabilities struct {
	internal, copyEngine, peer, nccl capability
	verdict                          verdict
	verdictWhy                       string // pair and numbers behind a verdict that is neither ok nor denied
}

func (c *capabilities) of(p Path) *capability {
	switch p {
	case PathInternal:
		return &c.internal
	case PathCopyEngine:
		return &c.copyEngine
	case PathPeer:
		return &c.peer
	case PathNCCL:
		return &c.nccl
	}
	return &capability{why: "no such path"}
}

// Band is one row of a routing table: payloads above the previous row's MaxBytes and up to MaxBytes take Path.
type Band struct {
	MaxBytes int64 // inclusive
	Path     Path
	Wire     Type
	Reason   string // where sized, what follows "N bytes "

	sized    bool
	err      *Error // no path serves this band
	fallback *Band  // where Path's memory cannot be allocated; nil: nothing else serves
}

// route gives the band's public form for a payload; it formats, so it stays off the hot path.
func (b *Band) route(bytes int64) Route {
	reason := b.Reason
	if b.sized {
		reason = fmt.Sprintf("%d bytes %s", bytes, reason)
	}
	return Route{Path: b.Path, Wire: b.Wire, Reason: reason}
}

// routeTable holds the bands of each element type, contiguous and strided. It is plain data and never changes.
type routeTable struct {
	ranks    int
	disabled bool
	bands    [numTypes][2][]Band // by type, then by strided
}

// route looks up the band of a reduction: bytes is the payload per rank. It does not allocate unless it fails.
func (t *routeTable) route(bytes int64, typ Type, op Op, strided bool) (*Band, error) {
	if bytes < 0 || !typ.valid() || !op.valid() {
		return nil, newError("", ErrArgument, "no route for %d bytes of %s, %s", bytes, typ, op)
	}
	if op == Avg && typ.integer() && bytes > 0 && t.ranks > 1 && !t.disabled {
		return nil, newError("", ErrUnsupported, "avg of %s is not supported: integers can be summed only", typ)
	}
	layout := 0
	if strided {
		layout = 1
	}
	bands := t.bands[typ][layout]
	for i := range bands {
		if b := &bands[i]; bytes <= b.MaxBytes {
			if b.err != nil {
				failure := *b.err // a copy: the caller adds its operation
				return nil, &failure
			}
			return b, nil
		}
	}
	return nil, newError("", ErrArgument, "no route for %d bytes", bytes) // not reached: the last band is open
}

// next gives the band to use where the memory of b's path could not be allocated (rule 6). NCCL has none: its failure
// is a typed error of its own.
func (t *routeTable) next(b *Band) (*Band, error) {
	if b.fallback == nil {
		return nil, newError("", ErrAlloc, "%s could not be allocated and no other path serves", b.Path)
	}
	return b.fallback, nil
}

// newRouteTable applies the rules once for every interval of sizes in which nothing can change. It fails where a forced
// path cannot exist.
func newRouteTable(s *settings, caps *capabilities, ranks int) (*routeTable, error) {
	r := newRouter(s, caps, ranks)
	if err := r.checkForced(); err != nil {
		return nil, err
	}
	t := &routeTable{ranks: ranks, disabled: s.algorithm == AlgorithmNone}
	starts := r.starts()
	for typ := range Type(numTypes) {
		for layout := range 2 {
			var bands []Band
			for i, start := range starts {
				b := r.decide(start, typ, layout == 1)
				b.MaxBytes = math.MaxInt64
				if i+1 < len(starts) {
					b.MaxBytes = starts[i+1] - 1
				}
				if last := len(bands) - 1; last >= 0 && bands[last].same(&b) {
					bands[last].MaxBytes = b.MaxBytes
				} else {
					bands = append(bands, b)
				}
			}
			t.bands[typ][layout] = bands
		}
	}
	return t, nil
}

// uses says whether a path serves some band, or may have to take one over.
func (t *routeTable) uses(p Path) bool {
	for typ := range t.bands {
		for layout := range t.bands[typ] {
			for i := range t.bands[typ][layout] {
				for b := &t.bands[typ][layout][i]; b != nil; b = b.fallback {
					if b.err == nil && b.Path == p {
						return true
					}
				}
			}
		}
	}
	return false
}

// same says whether two bands differ in their sizes only.
func (b *Band) same(o *Band) bool {
	if b == nil || o == nil {
		return b == o
	}
	if (b.err == nil) != (o.err == nil) || b.err != nil && b.err.Message != o.err.Message {
		return false
	}
	return b.Path == o.Path && b.Wire == o.Wire && b.Reason == o.Reason && b.sized == o.sized && b.fallback.same(o.fallback)
}

// router is what the rules look at.
type router struct {
	s     *settings
	caps  *capabilities
	ranks int

	proven, unproven bool
	provenBy         string // where proven: by what
	noPeer           string // else: why peer access is not used, where that is worth a word
}

func newRouter(s *settings, caps *capabilities, ranks int) *router {
	r := &router{s: s, caps: caps, ranks: ranks}
	switch {
	case caps.verdict == verdictDenied || caps.verdict == verdictOneDevice:
	case s.ncclP2PDisable:
		r.noPeer = "NCCL_P2P_DISABLE=1"
	case s.p2p == P2POff:
		r.noPeer = "GGML_CUDA_P2P=0"
	case caps.verdict == verdictProven:
		r.proven, r.provenBy = true, "peer access is proven"
	case s.p2p == P2PTrust:
		r.proven, r.provenBy = true, "peer access is trusted by GGML_CUDA_P2P=1"
	case caps.verdict == verdictUnproven:
		r.unproven = true
		r.noPeer = "peer access not proven: run allreduce probe"
	default:
		r.noPeer = "peer access is " + caps.verdict.String()
		if caps.verdictWhy != "" {
			r.noPeer += ": " + caps.verdictWhy
		}
	}
	return r
}

// checkForced fails where a forced path cannot exist (rule 2). One rank needs no path.
func (r *router) checkForced() error {
	forced := r.forced()
	if forced == PathNone || r.ranks <= 1 {
		return nil
	}
	setting := "GGML_CUDA_ALLREDUCE=" + algorithmText(r.s.algorithm)
	if forced == PathCopyEngine && !r.s.ce {
		return newError("", ErrSetting, "%s contradicts GGML_CUDA_AR_CE=0", setting)
	}
	if c := r.caps.of(forced); !c.ok && (forced != PathPeer || r.proven) {
		sentinel := ErrUnsupported
		if forced == PathNCCL {
			sentinel = ErrNCCL
		}
		return newError("", sentinel, "%s cannot be had here: %s", setting, r.absent(forced))
	}
	if forced == PathPeer && !r.proven {
		why := r.noPeer
		switch r.caps.verdict {
		case verdictDenied:
			why = "the driver denies peer access"
		case verdictOneDevice:
			why = "all ranks share one device"
		}
		return newError("", ErrUnsupported, "%s cannot be had here: %s", setting, why)
	}
	return nil
}

func (r *router) forced() Path {
	switch r.s.algorithm {
	case AlgorithmInternal:
		return PathInternal
	case AlgorithmCopyEngine:
		return PathCopyEngine
	case AlgorithmPeer:
		return PathPeer
	case AlgorithmNCCL:
		return PathNCCL
	}
	return PathNone
}

// starts lists the sizes from which on another decision is possible, ascending from 0.
func (r *router) starts() []int64 {
	starts := []int64{0, 1, r.s.ceMinBytes, ncclBF16MinBytes, latencyBorderExactBF16, latencyBorderExact, latencyBorderBF16,
		latencyBorderNarrow, r.peerMin()}
	for _, optional := range []int64{r.s.ncclMinBytes, r.s.bf16Threshold} {
		if optional > 0 {
			starts = append(starts, optional)
		}
	}
	if most := r.peerMax(); most < math.MaxInt64 {
		starts = append(starts, most+1)
	}
	slices.Sort(starts)
	return slices.Compact(starts)
}

func (r *router) peerMin() int64 {
	if r.s.peerMinBytes >= 0 {
		return r.s.peerMinBytes
	}
	return peerMinMeasured
}

func (r *router) peerMax() int64 {
	if r.s.peerMaxBytes > 0 {
		return r.s.peerMaxBytes
	}
	return peerMaxMeasured
}

// decide applies the rules to one size; the tables are made of its answers.
func (r *router) decide(bytes int64, typ Type, strided bool) Band {
	switch { // rules 0 and 1
	case bytes == 0:
		return Band{Path: PathNone, Wire: TypeNone, Reason: "no elements: nothing to do"}
	case r.ranks <= 1:
		return Band{Path: PathNone, Wire: TypeNone, Reason: "one rank: the result is a copy"}
	case r.s.algorithm == AlgorithmNone:
		return Band{Wire: TypeNone, err: newError("", ErrDisabled, "GGML_CUDA_ALLREDUCE=none: the caller reduces")}
	}
	q := query{r: r, bytes: bytes, typ: typ, strided: strided}
	if forced := r.forced(); forced != PathNone { // rule 2
		return q.take(forced, "GGML_CUDA_ALLREDUCE="+algorithmText(r.s.algorithm), false)
	}
	if least := r.s.ncclMinBytes; least > 0 && bytes >= least && q.cannot(PathNCCL) == "" { // rule 3
		return q.take(PathNCCL, "reach GGML_CUDA_AR_NCCL_MIN_BYTES="+FormatBytes(least), true)
	}
	note := r.noPeer
	if r.proven { // rule 4
		switch {
		case r.caps.peer.ok:
			return q.proven()
		case r.caps.nccl.ok:
			return q.take(PathNCCL, r.provenBy+", but "+r.absent(PathPeer), false)
		}
		note = r.absent(PathPeer)
	}
	if r.unproven && r.caps.nccl.ok && q.cannot(PathNCCL) == "" {
		b := q.take(PathNCCL, "", false)
		b.Reason = r.noPeer // it says what to do, which a path's name behind it would blur
		return b
	}
	border, name := q.border() // rule 5
	var b Band
	if bytes < border {
		b = q.take(PathInternal, "are below "+name, true)
	} else {
		b = q.take(PathCopyEngine, "reach "+name, true)
	}
	if note != "" && b.err == nil {
		b.Reason += " (" + note + ")"
	}
	return b
}

// query is one question to the router.
type query struct {
	r       *router
	bytes   int64
	typ     Type
	strided bool
}

// proven is rule 4 where there is a peer path: inside its band, or wherever there is no NCCL.
func (q *query) proven() Band {
	r := q.r
	least, most := r.peerMin(), r.peerMax()
	switch {
	case q.bytes < least:
		if r.caps.nccl.ok {
			return q.take(PathNCCL, "are below GGML_CUDA_AR_PEER_MIN_BYTES="+FormatBytes(least), true)
		}
	case q.bytes > most:
		name := "GGML_CUDA_AR_PEER_MAX_BYTES=" + FormatBytes(most)
		if r.s.peerMaxBytes == 0 {
			name = FormatBytes(most) + ", up to which the peer path was measured to win"
		}
		if r.caps.nccl.ok {
			return q.take(PathNCCL, "exceed "+name, true)
		}
	default:
		return q.take(PathPeer, r.provenBy, false)
	}
	return q.take(PathPeer, r.provenBy+" and "+r.absent(PathNCCL), false)
}

// border is the size from which on the copy engines serve, and its name for the reason.
func (q *query) border() (int64, string) {
	s := q.r.s
	if s.prefer != PreferLatency || s.ceMinSet {
		return s.ceMinBytes, "GGML_CUDA_AR_CE_MIN_BYTES=" + FormatBytes(s.ceMinBytes)
	}
	internal, engines := q.wire(PathInternal), q.wire(PathCopyEngine)
	border := int64(latencyBorderExact)
	switch {
	case q.typ.Size() == 2:
		border = latencyBorderNarrow
	case internal == F32 && engines != F32:
		border = latencyBorderExactBF16
	case internal != F32:
		border = latencyBorderBF16
	}
	return border, fmt.Sprintf("%s, where copy-engine with wire %s was measured to pass internal with wire %s (GGML_CUDA_AR_PREFER=latency)",
		FormatBytes(border), engines, internal)
}

// wire is what would travel on a path: 16-bit payloads as they are, F32 by the settings.
func (q *query) wire(p Path) Type {
	if q.typ != F32 {
		return q.typ
	}
	s := q.r.s
	switch s.wire {
	case WireF32:
		return F32
	case WireBF16:
		return BF16
	case WireF16:
		return F16
	}
	narrow := false
	switch {
	case s.bf16Threshold > 0:
		narrow = q.bytes >= s.bf16Threshold
	case s.bf16Threshold == BF16Never:
	case p == PathCopyEngine:
		narrow = true
	case p == PathNCCL:
		narrow = q.bytes >= ncclBF16MinBytes
	}
	if narrow {
		return BF16
	}
	return F32
}

// cannot says why a path cannot take the reduction; "" if it can.
func (q *query) cannot(p Path) string {
	c, wire := q.r.caps.of(p), q.wire(p)
	switch {
	case p == PathCopyEngine && !q.r.s.ce:
		return "GGML_CUDA_AR_CE=0"
	case !c.ok:
		return q.r.absent(p)
	case !c.types.has(q.typ):
		return fmt.Sprintf("%s does not take %s", p, q.typ)
	case q.typ == F32 && !c.wires.has(wire):
		return fmt.Sprintf("%s has no wire %s", p, wire)
	case q.strided && !c.strided:
		return fmt.Sprintf("%s does not take strided rows", p)
	}
	return ""
}

// take gives the band of the path the rules chose, or what rule 6 makes of it.
func (q *query) take(chosen Path, why string, sized bool) Band {
	obstacle := q.cannot(chosen)
	if obstacle == "" {
		return q.band(chosen, why+": "+chosen.String(), sized, 1<<chosen)
	}
	obstacles := []string{obstacle}
	for _, p := range rule6 {
		if p == chosen {
			continue
		}
		if obstacle = q.cannot(p); obstacle == "" {
			reason := fmt.Sprintf("%s, but %s: %s", why, strings.Join(obstacles, " and "), p)
			return q.band(p, reason, sized, 1<<chosen|1<<p)
		}
		obstacles = append(obstacles, obstacle)
	}
	layout := "contiguous"
	if q.strided {
		layout = "strided"
	}
	return Band{Wire: TypeNone, err: newError("", ErrUnsupported, "no path here takes %s, %s: %s", q.typ, layout, strings.Join(obstacles, "; "))}
}

// rule6 is the order of the substitutes: NCCL covers everything; internal serves every size, slowly; the engines are
// left where internal does not exist (before compute capability 7.0).
var rule6 = [...]Path{PathNCCL, PathInternal, PathCopyEngine}

// band fills in the wire and the chain of substitutes for an allocation that fails; tried is a set of paths.
func (q *query) band(p Path, reason string, sized bool, tried uint) Band {
	b := Band{Path: p, Wire: q.wire(p), Reason: reason, sized: sized}
	if p == PathNCCL {
		return b
	}
	for _, next := range rule6 {
		if tried&(1<<next) == 0 && q.cannot(next) == "" {
			substitute := q.band(next, fmt.Sprintf("%s could not be allocated: %s", p, next), false, tried|1<<next)
			substitute.MaxBytes = math.MaxInt64
			b.fallback = &substitute
			break
		}
	}
	return b
}

// absent says that a path does not exist here, and why.
func (r *router) absent(p Path) string {
	name, why := p.String(), r.caps.of(p).why
	if p == PathNCCL {
		name = "NCCL"
	}
	if why == "" {
		return name + " is not available"
	}
	return fmt.Sprintf("%s is not available (%s)", name, why)
}

// algorithmText is the spelling of a choice of GGML_CUDA_ALLREDUCE.
func algorithmText(a Algorithm) string {
	for _, n := range algorithmNames {
		if n.value == a {
			return n.text
		}
	}
	return "auto"
}
