//go:build allreduce_never_set

package allreduce

import "embed"

// `go mod vendor` leaves out folders without Go files, and internal/core includes csrc: without this line a vendored copy
// would not compile. The tag is never set, so nothing is embedded into any program; vendoring looks at every file.
//
//go:embed csrc
var _ embed.FS
