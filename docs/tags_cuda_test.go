//go:build cuda

package docs

// tags are the build tags of this test, for the programs it builds: the same as its own, so that nothing is compiled twice.
var tags = []string{"-tags", "cuda"}
