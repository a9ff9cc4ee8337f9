package oncehttp

import (
	"bytes"
	"flag"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write api.txt anew")

// publicDirs are the root module's packages that others import.
var publicDirs = []string{".", "faulty", "store/sqlstore"}

// TestApiTxtIsTheExportedAPI makes every change of the surface show in a diff.
// `go test -run ApiTxt . -update` writes it anew.
func TestApiTxtIsTheExportedAPI(t *testing.T) {
	var got strings.Builder
	for _, dir := range publicDirs {
		got.WriteString(exportedAPI(t, dir))
	}
	if *update {
		require.NoError(t, os.WriteFile("api.txt", []byte(got.String()), 0o666))
	}
	want, err := os.ReadFile("api.txt")
	require.NoError(t, err)
	require.Equal(t, string(want), got.String(), "the exported API has changed: go test -run ApiTxt . -update, and tell it in CHANGELOG.md")
}

func parseDir(t *testing.T, dir string) (*token.FileSet, []*ast.File) {
	t.Helper()
	fset := token.NewFileSet()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
		require.NoError(t, err)
		files = append(files, f)
	}
	return fset, files
}

func exportedAPI(t *testing.T, dir string) string {
	fset, files := parseDir(t, dir)
	p, err := doc.NewFromFiles(fset, files, "github.com/oncehttp/oncehttp/"+dir)
	require.NoError(t, err)
	var lines []string
	add := func(node any) {
		var b bytes.Buffer
		require.NoError(t, (&printer.Config{Mode: printer.UseSpaces, Tabwidth: 4}).Fprint(&b, fset, node))
		lines = append(lines, strings.TrimSpace(b.String()))
	}
	values := func(vs []*doc.Value) {
		for _, v := range vs {
			for _, spec := range v.Decl.Specs {
				spec := spec.(*ast.ValueSpec)
				spec.Doc, spec.Comment = nil, nil
				for _, name := range spec.Names {
					if name.IsExported() {
						lines = append(lines, v.Decl.Tok.String()+" "+name.Name)
					}
				}
			}
		}
	}
	funcs := func(fs []*doc.Func) {
		for _, f := range fs {
			f.Decl.Doc, f.Decl.Body = nil, nil
			add(f.Decl)
		}
	}
	values(p.Consts)
	values(p.Vars)
	funcs(p.Funcs)
	for _, typ := range p.Types {
		for _, spec := range typ.Decl.Specs {
			spec := spec.(*ast.TypeSpec)
			exportedFieldsOnly(spec)
			lines = append(lines, "type "+oneType(t, fset, spec))
		}
		values(typ.Consts)
		values(typ.Vars)
		funcs(typ.Funcs)
		funcs(typ.Methods)
	}
	slices.Sort(lines)
	return "package " + p.Name + "\n\n" + strings.Join(lines, "\n") + "\n\n"
}

func exportedFieldsOnly(spec *ast.TypeSpec) {
	spec.Doc, spec.Comment = nil, nil
	var fields *ast.FieldList
	switch typ := spec.Type.(type) {
	case *ast.StructType:
		fields = typ.Fields
	case *ast.InterfaceType:
		fields = typ.Methods
	default:
		return
	}
	var kept []*ast.Field
	for _, f := range fields.List {
		f.Doc, f.Comment = nil, nil
		f.Names = slices.DeleteFunc(f.Names, func(n *ast.Ident) bool { return !n.IsExported() })
		if len(f.Names) > 0 || ast.IsExported(strings.TrimPrefix(exprName(f.Type), "*")) {
			kept = append(kept, f)
		}
	}
	fields.List = kept
}

func exprName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.StarExpr:
		return exprName(e.X)
	}
	return ""
}

func oneType(t *testing.T, fset *token.FileSet, spec *ast.TypeSpec) string {
	var b bytes.Buffer
	require.NoError(t, printer.Fprint(&b, token.NewFileSet(), spec))
	var lines []string
	for _, line := range strings.Split(b.String(), "\n") {
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n\t")
}

// TestTheRootImportsOnlyWhatTheDesignAllows keeps a small library small.
func TestTheRootImportsOnlyWhatTheDesignAllows(t *testing.T) {
	allowed := []string{"github.com/google/uuid", "github.com/sony/gobreaker/v2", "golang.org/x/time/rate", "github.com/oncehttp/oncehttp"}
	checked := 0
	for _, dir := range packageDirs(t) {
		_, files := parseDir(t, dir)
		for _, f := range files {
			for _, imp := range f.Imports {
				path, err := strconv.Unquote(imp.Path.Value)
				require.NoError(t, err)
				checked++
				if first, _, _ := strings.Cut(path, "/"); strings.Contains(first, ".") {
					ok := slices.ContainsFunc(allowed, func(a string) bool { return strings.HasPrefix(path, a) })
					require.True(t, ok, "%s imports %s", dir, path)
				}
			}
		}
	}
	require.Greater(t, checked, 50)
}

// TestEveryPackageSaysWhatItIs asks for a package comment.
func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for _, dir := range packageDirs(t) {
		_, files := parseDir(t, dir)
		has := slices.ContainsFunc(files, func(f *ast.File) bool { return f.Doc != nil })
		require.True(t, has, "%s has no package comment", dir)
	}
}

// packageDirs are the folders of the root module that hold Go code.
func packageDirs(t *testing.T) []string {
	var dirs []string
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if path != "." {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil || strings.HasPrefix(d.Name(), ".") {
				return filepath.SkipDir // a module of its own
			}
		}
		if names, _ := filepath.Glob(filepath.Join(path, "*.go")); len(names) > 0 {
			dirs = append(dirs, path)
		}
		return nil
	}))
	return dirs
}
